"""Draw the images of the pack `builtin/images` from a seed: PNG files with three coloured shapes."""

import base64
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from math import isqrt
from random import Random

import msgspec

# Sizes in pixels: the usual square of image encoders, a larger one, and a wide and a tall one, which many models split
# into tiles.
SIZES = ((224, 224), (448, 448), (640, 360), (300, 600))
_BEFORE = "A child painted the next picture at school."
_COLOURS = {"red": (220, 40, 30), "green": (30, 160, 60), "blue": (30, 70, 210), "yellow": (240, 210, 40)}
_SHAPES = ("circle", "square", "triangle")
_QUESTIONS = (
    "Describe this picture: its shapes, their colours and their places.",
    "Which shape in this picture is the largest, and what is left and right of it?",
)


class ImageQuestion(msgspec.Struct, frozen=True):
    """Image in a prompt: its seed, its size in pixels, the text before it (may be empty), and the question after it.

    The seed and the size suffice to draw it, so a baseline stores no pixels. Refuse sizes other than SIZES: anybody who
    may write ConfigMaps could ask for an image that does not fit into memory.
    """

    seed: int
    width: int
    height: int
    before: str
    question: str

    def __post_init__(self) -> None:
        if (self.width, self.height) not in SIZES:
            raise ValueError(f"an image of {self.width} x {self.height} pixels; the pack has none of this size")

    @property
    def text(self) -> str:
        """Return the prompt with the image's size in place of the image, for people to read."""
        return f"{self.before} [image of {self.width} x {self.height} pixels] {self.question}".strip()

    def chat(self) -> list[dict[str, object]]:
        """Return the chat to send: one message with the image as a data URL."""
        encoded = base64.b64encode(png(self.seed, self.width, self.height)).decode()
        parts: list[dict[str, object]] = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
            {"type": "text", "text": self.question},
        ]
        return [{"role": "user", "content": [{"type": "text", "text": self.before}, *parts] if self.before else parts}]


def questions(seed: int) -> Iterator[ImageQuestion]:
    """Yield the pack's prompts: two questions about each image. Half of the images have a text before them."""
    for index, (width, height) in enumerate(SIZES):
        for question in _QUESTIONS:
            yield ImageQuestion(seed + index, width, height, _BEFORE if index % 2 else "", question)


@lru_cache(maxsize=len(SIZES))
def png(seed: int, width: int, height: int) -> bytes:
    """Return a PNG file. Equal arguments give equal pixels, so that answers can be compared."""
    rng = Random(seed)  # noqa: S311 - repeatable images, nothing secret
    radius = min(width, height) // 6
    shapes = [
        (shape, _COLOURS[colour], width * (2 * at + 1) // 6, rng.randint(2 * radius, height - 2 * radius), radius - at)
        for at, (shape, colour) in enumerate(zip(_SHAPES, rng.sample(sorted(_COLOURS), len(_SHAPES)), strict=True))
    ]
    ground = [rng.randint(150, 255) for _ in range(3)]
    rows = bytearray()
    for y in range(height):
        row = bytearray(bytes(value - 100 * y // height for value in ground) * width)
        for shape, colour, x, middle, size in shapes:
            down = y - middle
            if abs(down) <= size:
                half = {"circle": isqrt(size * size - down * down), "square": size, "triangle": (down + size) // 2}
                row[3 * (x - half[shape]) : 3 * (x + half[shape])] = bytes(colour) * (2 * half[shape])
        rows += b"\0" + row  # filter type 0: the row's bytes as they are
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB, not interlaced
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(rows), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
