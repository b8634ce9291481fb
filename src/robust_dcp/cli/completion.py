"""What a shell reads to complete commands, options and their values, in bash, zsh and fish."""

from __future__ import annotations

import os
from collections.abc import Mapping

from robust_dcp.cli.output import CommandFailed

__all__ = ["run"]

_STARTS = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


def run(words: Mapping[str, Mapping[str, list[str]]], *, install: bool) -> None:
    """Print the script of the user's shell, or let each new shell read it.

    Args:
        words: the commands with their options, and the values of those that have a choice.
    """
    shell = os.path.basename(os.environ.get("SHELL", "bash"))
    if shell not in _STARTS:
        raise CommandFailed(f"{shell} is not a shell that can complete: set SHELL to bash, zsh or fish")
    if not install:
        print(_fish(words) if shell == "fish" else _bash(words, is_zsh=shell == "zsh"))
        return
    file = os.path.expanduser(_STARTS[shell])
    script = f"SHELL={shell} robust-dcp --show-completion"
    os.makedirs(os.path.dirname(file), exist_ok=True)
    with open(file, "a", encoding="utf-8") as start:
        start.write(f"\n{script} | source\n" if shell == "fish" else f'\neval "$({script})"\n')
    print(f"{file} has a new line: begin a new shell")


def _bash(words: Mapping[str, Mapping[str, list[str]]], *, is_zsh: bool) -> str:
    values = [
        f"    '{name} {option}') words='{' '.join(choices)}' ;;"
        for name, options in words.items()
        for option, choices in options.items()
        if choices
    ]
    options = [f"      {name}) words='{' '.join(options)}' ;;" for name, options in words.items()]
    return "\n".join(
        (
            *(["autoload -Uz bashcompinit && bashcompinit"] if is_zsh else []),
            "_robust_dcp_completion() {",
            "  local words='' last=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]}",
            '  case "$command ${COMP_WORDS[COMP_CWORD-1]}" in',
            *values,
            "    *)",
            f"      if [ $COMP_CWORD = 1 ]; then words='{' '.join(words)} --help --version'",
            "      elif [[ $last == -* ]]; then case $command in",
            *options,
            "      esac; fi ;;",
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$last"))',
            "}",
            "complete -o default -F _robust_dcp_completion robust-dcp",
        )
    )


def _fish(words: Mapping[str, Mapping[str, list[str]]]) -> str:
    lines = [f"complete -c robust-dcp -n __fish_use_subcommand -a '{' '.join(words)}'"]
    for name, options in words.items():
        for option, choices in options.items():
            is_long = option.startswith("--")
            values = f" -x -a '{' '.join(choices)}'" if choices else ""
            how = f"-l {option[2:]}" if is_long else f"-s {option[1:]}"
            lines.append(f"complete -c robust-dcp -n '__fish_seen_subcommand_from {name}' {how}{values}")
    return "\n".join(lines)
