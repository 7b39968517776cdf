"""Commands in the shell blocks of a documentation page, and the options that the programs support."""

import re
import shlex
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import yaml

from kvpilot_localcluster.toolbox.helm import run_helm

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^( *)```sh\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_GIVEN = re.compile(r"<<EOF\n(.*?)\nEOF\n", re.DOTALL)
# Subcommands of two words.
_DEEPER = {("repo", "add"), ("create", "namespace"), ("auth", "can-i"), ("rollout", "status")}


class Command(NamedTuple):
    """A command in a page's shell block, with its standard input."""

    words: tuple[str, ...]
    given: str

    @property
    def options(self) -> tuple[str, ...]:
        """The command's options, without their values."""
        return tuple(word.partition("=")[0] for word in self.words if re.match(r"-{1,2}[a-zA-Z]", word))

    @property
    def name(self) -> str:
        """The words of the command before its first option."""
        first = next((i for i, word in enumerate(self.words) if word.startswith("-")), len(self.words))
        return " ".join(self.words[:first])


def commands_of(text: str, environment: Mapping[str, str] | None = None) -> list[Command]:
    """Return the commands of a page's shell blocks in order.

    Variables get their values from the page or from `environment`. An unknown variable raises KeyError.
    """
    found: list[Command] = []
    variables = dict(environment or {})
    for block in (dedent(block) for _, block in _BLOCK.findall(text)):
        given = iter(_GIVEN.findall(block))
        script = _GIVEN.sub("<<EOF\n", block).replace("\\\n", " ")
        for line in script.splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            words = list(lexer)
            if len(words) == 1 and re.match(r"[A-Z_]+=", words[0]):
                key, _, value = words[0].partition("=")
                variables[key] = _filled(value, variables)
                continue
            here = next(given) if "<<" in words else ""
            words = words[: words.index("<<")] if "<<" in words else words
            part: list[str] = []
            for word in [*words, "|"]:
                if word in ("|", "&", "&&", ";"):
                    if part:
                        found.append(Command(tuple(part), _filled(here, variables)))
                    part = []
                else:
                    part.append(_filled(word, variables))
    return found


def _filled(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$([A-Z_]+)", lambda name: variables[name[1]], text)


@cache
def options_of(program: Path, *command: str) -> frozenset[str]:
    """Return the options that kubectl or Helm print in their help for a command."""
    said = [
        subprocess.run([program, *argv], capture_output=True, text=True, check=True).stdout
        for argv in ([*command, "--help"], *([["options"]] if program.name == "kubectl" else []))
    ]
    return frozenset(re.findall(r"(?<![\w-])(--?[a-zA-Z][\w-]*)", "\n".join(said)))


def subcommand(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the subcommand of kubectl or Helm without the options before it: "get" for `kubectl -n models get`."""
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        rest = rest[1 if "=" in rest[0] else 2 :]
    if rest[:2] == ["create", "secret"]:
        return tuple(rest[:3])
    return tuple(rest[:2]) if tuple(rest[:2]) in _DEEPER else (rest[0],)


def installed_images(install: Command) -> set[str]:
    """Return the images of the Deployments that a `helm install` of our chart creates with its `--set` values."""
    values = [install.words[i + 1] for i, word in enumerate(install.words) if word == "--set"]
    text = run_helm("template", "kvpilot", ROOT / "charts/kvpilot", *(f"--set={value}" for value in values))
    return {
        container["image"]
        for one in yaml.safe_load_all(text) if one and one["kind"] == "Deployment"
        for container in one["spec"]["template"]["spec"]["containers"]
    }  # fmt: skip
