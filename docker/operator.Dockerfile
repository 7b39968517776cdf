# The operator: our wheel with the extra `operator`, installed by the hashes in operator.lock. The image has no torch, no
# vLLM and no compiler. Tags do not fix the base image, so a release fails while PYTHON_DIGEST is empty
# (docs/releasing.md).
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm
ARG PYTHON_DIGEST=

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
WORKDIR /src
COPY . .
RUN python3 -m venv /build \
    && /build/bin/python -m pip install --no-cache-dir --only-binary :all: --require-hashes --requirement docker/build.lock \
    && /build/bin/python -m pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /dist . \
    && python3 -m venv --without-pip /opt/kvpilot \
    && /build/bin/python -m pip --python /opt/kvpilot/bin/python install --no-cache-dir --only-binary :all: --no-deps \
        --require-hashes --requirement docker/operator.lock \
    && /build/bin/python -m pip --python /opt/kvpilot/bin/python install --no-cache-dir --no-index --no-deps /dist/*.whl \
    && /build/bin/python -m pip --python /opt/kvpilot/bin/python check
# The operator uses only connections and credentials of the Kubernetes client. The client's generated API classes (74 MB
# without bytecode) are imported on demand, and nothing imports them, so remove them.
RUN client=$(echo /opt/kvpilot/lib/python3.*/site-packages/kubernetes) \
    && find "${client}/client/api" "${client}/client/models" "${client}/aio/client/api" "${client}/aio/client/models" \
        -type f ! -name __init__.py -delete \
    && /opt/kvpilot/bin/python -c "import kvpilot_operator.main"

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG PYTHON_IMAGE
LABEL org.opencontainers.image.title="kvpilot operator" \
      org.opencontainers.image.description="Gives every LLM the smallest KV cache it can afford, and proves it" \
      org.opencontainers.image.source="https://github.com/kvpilot/kvpilot" \
      org.opencontainers.image.documentation="https://github.com/kvpilot/kvpilot/tree/main/docs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="kvpilot" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
COPY --from=build /opt/kvpilot /opt/kvpilot
ENV PATH=/opt/kvpilot/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# Use a number, so that a kubelet can see that the user is not root. The user owns no file of the image.
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["kvpilot-operator"]
