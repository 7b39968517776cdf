# The engine: vLLM's own image, and our wheel without its dependencies, which vLLM's image has already.
# requirements.lock has the version of vLLM that `make test` runs. VLLM_IMAGE may also be a version 0.33
# (docs/serving.md).
# Tags do not fix base images, so a release fails while VLLM_DIGEST or PYTHON_DIGEST is empty (docs/releasing.md).
ARG VLLM_IMAGE=docker.io/vllm/vllm-openai:v0.32.0
ARG VLLM_DIGEST=
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm
ARG PYTHON_DIGEST=

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
WORKDIR /src
COPY . .
RUN python3 -m venv /build \
    && /build/bin/python -m pip install --no-cache-dir --only-binary :all: --require-hashes --requirement docker/build.lock \
    && /build/bin/python -m pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /dist .

FROM ${VLLM_IMAGE}${VLLM_DIGEST:+@${VLLM_DIGEST}}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG VLLM_IMAGE
LABEL org.opencontainers.image.title="kvpilot runtime" \
      org.opencontainers.image.description="vLLM with kvpilot's quantized KV caches" \
      org.opencontainers.image.source="https://github.com/kvpilot/kvpilot" \
      org.opencontainers.image.documentation="https://github.com/kvpilot/kvpilot/tree/main/docs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="kvpilot" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${VLLM_IMAGE}"
COPY --from=build /dist /tmp/dist
# torch and vLLM need a user with a name and a home folder. Caches are written there, unless a claim holds them.
# OpenShift runs the image as a user without a name, in group 0.
RUN python3 -m pip install --no-cache-dir --no-index --no-deps --break-system-packages /tmp/dist/*.whl \
    && rm -r /tmp/dist \
    && groupadd --gid 65532 kvpilot \
    && useradd --uid 65532 --gid 65532 --create-home --home-dir /home/kvpilot --shell /usr/sbin/nologin kvpilot \
    && chgrp -R 0 /home/kvpilot \
    && chmod -R g=u /home/kvpilot
ENV HOME=/home/kvpilot USER=kvpilot
WORKDIR /home/kvpilot
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["kvpilot-serve"]
