"""Valid texts and texts that harm parsers, such as a tenant may send. Each has about the requested number of bytes."""

import itertools
import json
import zlib
from collections.abc import Callable
from typing import Any

from kvpilot_localcluster.engines import PAGE_LATER

Make = Callable[[int], bytes]

REAL = PAGE_LATER.read_bytes()
USAGE = b"vllm:kv_cache_usage_perc"
# Give each spec a different number. Otherwise the operator would find its verdict on an equal spec in its cache.
_SERIAL = itertools.count()


def _series(labels: bytes) -> bytes:
    return USAGE + b"{" + labels + b"} 0.5\n"


def _env(n: int) -> bytes:
    values = [{"name": f"V{i}", "value": f"{next(_SERIAL)}".ljust(1000, "x")} for i in range(max(1, n // 1030))]
    return json.dumps(_spec(engine={"image": "i", "env": values})).encode()


def _spec(**more: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a"}, "spec": {"model": {"source": "file:///m"}, "engine": {"image": "i"}, **more}}


PAGES: dict[str, Make] = {
    "a real page, again and again": lambda n: REAL * max(1, n // len(REAL)),
    "a label without an end": lambda n: _series(b"a" * n),
    "one quoted label": lambda n: _series(b'a="' + b"b" * n + b'"'),
    "escaped quotes": lambda n: _series(b'a="' + b'\\"' * (n // 2) + b'"'),
    "backslashes": lambda n: _series(b'a="' + b"\\" * n + b'"'),
    "many labels": lambda n: _series(b",".join(b'l%d="v"' % i for i in range(n // 10))),
    "commas": lambda n: _series(b"," * n),
    "braces": lambda n: USAGE + b"{" * n + b" 0.5\n",
    "blanks": lambda n: USAGE + b" " * n + b"x\n",
    "digits": lambda n: USAGE + b" 0." + b"1" * n + b"\n",
    "wanted lines": lambda n: (USAGE + b" 0.5\n") * (n // 29),
    "empty lines": lambda n: b"\n" * n,
    "one unwanted line": lambda n: b"# HELP x " + b"y" * n,
    "buckets": lambda n: b"".join(
        b'vllm:inter_token_latency_seconds_bucket{le="%d"} 1\n' % (i % 150) for i in range(n // 55)
    ),
}
YAML: dict[str, Make] = {
    "a list of texts": lambda n: b"prompts:\n" + b"- name: capital of France\n" * (n // 26),
    "merge keys": lambda n: b"- &a {k: v}\n- {<<: [" + b"*a, " * (n // 4) + b"*a]}\n",
    "nested lists": lambda n: b"[" * n,
    "nested mappings": lambda n: b"{a: " * (n // 4),
    "short keys": lambda n: b"".join(b"k%d: \n" % i for i in range(n // 8)),
    "one scalar": lambda n: b'"' + b"x" * n + b'"',
    "blanks": lambda n: b" " * n,
    "a number": lambda n: b"9" * n,
    "a number of colons": lambda n: b"1" + b":1" * (n // 2),
    "anchors": lambda n: b"".join(b"- &a%d x\n" % i for i in range(n // 10)),
}
TOKENS: dict[str, Make] = {
    "tokens": lambda n: b'{"count":1,"max_model_len":4096,"tokens":[' + b"12345," * (n // 6) + b"1]}",
    "objects": lambda n: b'{"tokens":[' + b"{}," * (n // 3) + b"{}]}",
    "nested lists": lambda n: b'{"x":' + b"[" * n,
    "nested objects": lambda n: b'{"a":' * (n // 5),
    "fields that nobody reads": lambda n: b"{" + b",".join(b'"k%d":[{}]' % i for i in range(n // 12)) + b"}",
    "NaN": lambda n: b'{"tokens":[' + b"NaN," * (n // 4) + b"1]}",
    "a number": lambda n: b'{"tokens":[' + b"9" * n + b"]}",
    "one text": lambda n: b'{"tokens":"' + b"\\u0041" * (n // 6) + b'"}',
}
CONFIG_MAPS: dict[str, Make] = {
    "one long text": lambda n: json.dumps({"data": {"prompts.yaml": "x\n" * (n // 3)}}).encode(),
    "short keys": lambda n: json.dumps({"data": {f"k{i}": "" for i in range(n // 12)}}).encode(),
    "annotations": lambda n: json.dumps({"metadata": {"annotations": {f"k{i}": "" for i in range(n // 12)}}}).encode(),
    "nested lists": lambda n: b'{"data":' + b"[" * n,
}
SPECS: dict[str, Make] = {
    "variables": _env,
    "unknown fields": lambda n: json.dumps(
        _spec(model={"source": f"file:///{next(_SERIAL)}"}, **{f"k{i}": 1 for i in range(n // 11)})
    ).encode(),
    "selectors": lambda n: json.dumps(
        _spec(
            engine={
                "image": "i",
                "podTemplate": {"spec": {"nodeSelector": {f"k{i}": f"v{next(_SERIAL)}" for i in range(n // 14)}}},
            }
        )
    ).encode(),
    "tolerations": lambda n: json.dumps(
        _spec(
            engine={
                "image": "i",
                "podTemplate": {"spec": {"tolerations": [{"key": f"k{next(_SERIAL)}"} for i in range(n // 17)]}},
            }
        )
    ).encode(),
    "arguments": lambda n: json.dumps(
        _spec(engine={"image": "i", "extraArgs": [f"--x{next(_SERIAL)}={'y' * 1000}" for _ in range(n // 1008)]})
    ).encode(),
}
BASELINES: dict[str, Make] = {
    "a bomb of zeros": lambda n: zlib.compress(bytes(1000 * n)),
    "many prompts": lambda n: zlib.compress(b"\x81\xa7prompts\xdd" + n.to_bytes(4, "big") + b"\x80" * n),
    "nested lists": lambda n: zlib.compress(b"\x81\xa7prompts" + b"\x91" * n),
    "no stream": lambda n: b"x" * n,
}
