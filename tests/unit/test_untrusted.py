"""External text can neither control a terminal nor leak a password, wherever kvpilot shows it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_formats.untrusted import printable, shown, without_credentials

TEXT = st.text(st.characters(codec=None), max_size=60)


@given(TEXT)
def test_every_character_shown_is_printable_and_on_one_line(text: str) -> None:
    found = shown(text)
    assert found.isprintable()
    found.encode()
    assert shown(found) == found


@given(TEXT)
def test_printable_text_keeps_its_lines_and_length(text: str) -> None:
    found = printable(text)
    assert len(found) == len(text)
    assert found.count("\n") == text.count("\n")
    assert found.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:PASSWORD@hub.example/x", "https://***@hub.example/x"),
        ("https://TOKEN@hub.example", "https://***@hub.example"),
        ("http://u:PASSWORD@10.0.0.1:3128: refused", "http://***@10.0.0.1:3128: refused"),
        ("s3://AKIA:PASS/WORD+1@bucket/key", "s3://***@bucket/key"),
        ("https://u:PASS@WORD@host/", "https://***@host/"),
        ("https://u:PASS\u202eWORD@host/", "https://***@host/"),
        ('"user:PASSWORD@registry.example/vllm:1"', '"***@registry.example/vllm:1"'),
        ("HTTPS_PROXY=user:PASSWORD@proxy:3128", "HTTPS_PROXY=***@proxy:3128"),
        ("two: http://a:PASSWORD@b http://c:PASSWORD@d", "two: http://***@b http://***@d"),
    ],
)
def test_credentials_in_an_address_are_not_shown(text: str, expected: str) -> None:
    assert shown(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "registry.example:5000/vllm:0.32@sha256:0123456789abcdef",
        "vllm:0.32@sha256:0123456789abcdef",
        "http://10.0.0.1:8000/v1/models?owner=a@b",
        "oci://registry.example/model:1@sha256:0123",
        "hf://org/model",
        "pod chat-1: HTTP 500: mail admin@example.org",
    ],
)
def test_text_without_credentials_is_unchanged(text: str) -> None:
    assert without_credentials(text) == text


NAME = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
SECRET = st.text(st.characters(codec="ascii", categories=["L"]), min_size=8, max_size=12)


@given(st.sampled_from(["http", "https", "s3", "hf", "oci", "socks5h", "grpc+tls"]), NAME, SECRET, TEXT, TEXT)
def test_a_password_in_an_address_is_never_shown_in_any_text(
    scheme: str, user: str, secret: str, before: str, after: str
) -> None:
    secret = f"Zq{secret}qZ"
    assert secret not in shown(f"{before} {scheme}://{user}:{secret}@host.example/{after}")
