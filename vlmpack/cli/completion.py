"""`vlmpack completion`: a script that completes the command in bash, zsh or fish, read off the verbs themselves.

The script holds every verb, option and word, so that completing starts no Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, final, get_args, get_type_hints

import typer

from vlmpack.cli import options

SHELLS = ("bash", "zsh", "fish")
NUMBERS = {int, float}


def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", autocompletion=lambda: list(SHELLS))],
) -> None:
    """Print a script that completes verbs, options, their words and file names in a shell.

    In ~/.bashrc: source <(vlmpack completion bash). In ~/.zshrc, after compinit: source <(vlmpack completion zsh). For
    fish: vlmpack completion fish > ~/.config/fish/completions/vlmpack.fish.
    """
    options.check_word("SHELL", shell, SHELLS)
    assert context.parent is not None
    typer.echo({"bash": bash, "zsh": zsh, "fish": fish}[shell](read_verbs(context.parent.command)), nl=False)


# ---------------------------------------------------------------------- the command, read off its parser


@final
@dataclass(frozen=True, kw_only=True)
class Value:
    """An option, or an argument without a dash."""

    names: tuple[str, ...]
    """"--quiet", "-q"; of an argument its name."""
    help: str
    """One line."""
    words: tuple[str, ...] = ()
    """The words that it takes; none: others."""
    is_flag: bool = False
    """It takes no value."""
    is_number: bool = False
    """It takes a number, else the name of a file, a folder or a model."""
    is_repeated: bool = False
    """It may stand more than once."""


@final
@dataclass(frozen=True, kw_only=True)
class Verb:
    """One verb."""

    name: str
    """The name that is typed."""
    help: str
    """One line."""
    options: tuple[Value, ...]
    """With dashes."""
    arguments: tuple[Value, ...]
    """Without."""


def read_verbs(group: Any) -> list[Verb]:
    """Read verbs, options and their words off the parser of a typer application."""
    return [_verb(name, command) for name, command in group.commands.items()]


def _verb(name: str, command: Any) -> Verb:
    context = typer.Context(command, info_name=name)
    types = get_type_hints(inspect.unwrap(command.callback))
    parameters = command.get_params(context)
    values = {kind: tuple(_value(each, context, types) for each in parameters if each.param_type_name == kind)
              for kind in ("option", "argument")}  # fmt: skip
    return Verb(name=name, help=_one_line(command.help or ""), options=values["option"], arguments=values["argument"])


def _value(parameter: Any, context: typer.Context, types: dict[str, Any]) -> Value:
    is_option = parameter.param_type_name == "option"
    hint = types.get(parameter.name, bool)  # --help belongs to the parser
    kinds = {hint, *get_args(hint)}  # as of "int | None", and below of "list[int] | None"
    return Value(
        names=(*parameter.opts, *parameter.secondary_opts) if is_option else (parameter.name,),
        help=_one_line(parameter.help or ""),
        words=tuple(item.value for item in parameter.shell_complete(context, "")),
        is_flag=is_option and parameter.is_flag,
        is_number=any(NUMBERS & {kind, *get_args(kind)} for kind in kinds),
        is_repeated=is_option and parameter.multiple,
    )


def _one_line(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


# ---------------------------------------------------------------------- scripts


def bash(verbs: Sequence[Verb]) -> str:
    """Return the script for bash 3.2 and newer. Files are completed by bash itself, where nothing else is."""
    values = [line for verb in verbs for line in _bash_values(verb)]
    options_of = [f'        {verb.name}) words="{" ".join(_names(verb))}" ;;' for verb in verbs]
    return "\n".join([
        "# Completes vlmpack in bash: source <(vlmpack completion bash)",
        "_vlmpack() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}" verb="${COMP_WORDS[1]}"',
        '    local words=""',
        "    COMPREPLY=()",
        '    case "$verb $before" in',
        *values,
        "    esac",
        "    if (( COMP_CWORD == 1 )); then",
        f'        words="{" ".join(verb.name for verb in verbs)} --version --help"',
        '    elif [[ -z $words && $word == -* ]]; then case "$verb" in',
        *options_of,
        "    esac; fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _vlmpack vlmpack",
        "",
    ])  # fmt: skip


def _names(verb: Verb) -> Iterator[str]:
    for option in verb.options:
        yield from option.names


def _bash_values(verb: Verb) -> Iterator[str]:
    """Yield branches of a `case` of the verb and the word before: what a value is completed with."""
    valued = [(option.names, option) for option in verb.options if not option.is_flag]
    valued += [((verb.name,), argument) for argument in verb.arguments[:1] if argument.words]
    kinds: dict[str, list[str]] = {}
    for names, value in valued:
        words, number = f'words="{" ".join(value.words)}"', "compopt +o default 2> /dev/null; return"
        action = words if value.words else number if value.is_number else "return"
        kinds.setdefault(action, []).extend(f'"{verb.name} {name}"' for name in names)
    for action, patterns in kinds.items():
        yield f"        {' | '.join(patterns)}) {action} ;;"


def zsh(verbs: Sequence[Verb]) -> str:
    """Return the script for zsh: sourced after compinit, or a file _vlmpack in a folder of $fpath."""
    lines = [
        "#compdef vlmpack",
        "# Completes vlmpack in zsh: source <(vlmpack completion zsh), after compinit",
        "_vlmpack() {",
        "    local -a verbs",
        "    verbs=(",
        *(f"        {_quoted(f'{verb.name}:{verb.help}')}" for verb in verbs),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe verb verbs",
        "        _arguments '--version[Show the version and exit.]' '--help[Show this message and exit.]'",
        "        return",
        "    fi",
        "    shift words",
        "    (( CURRENT-- ))",
        '    case "$words[1]" in',
    ]
    for verb in verbs:
        specs = [spec for option in verb.options for spec in _zsh_option(option)]
        specs += [
            _quoted(f"{place}:{value.names[0]}:{_zsh_action(value)}") for place, value in enumerate(verb.arguments, 1)
        ]
        lines += [f"        {verb.name}) _arguments \\", *(f"            {spec} \\" for spec in specs[:-1])]
        lines += [f"            {specs[-1]} ;;"]
    call = 'if [[ "$funcstack[1]" == "_vlmpack" ]]; then _vlmpack "$@"; else compdef _vlmpack vlmpack; fi'
    return "\n".join([*lines, "    esac", "}", call, ""])


def _zsh_option(option: Value) -> Iterator[str]:
    text = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in option.help)
    value = "" if option.is_flag else f":value:{_zsh_action(option)}"
    for name in option.names:
        yield _quoted(f"{'*' if option.is_repeated else ''}{name}[{text}]{value}")


def _zsh_action(value: Value) -> str:
    if value.words:
        return f"({' '.join(value.words)})"
    return " " if value.is_number else "_files"


def fish(verbs: Sequence[Verb]) -> str:
    """Return the script for fish."""
    lines = ["# Completes vlmpack in fish: ~/.config/fish/completions/vlmpack.fish", "complete -c vlmpack -f"]
    lines += [
        f"complete -c vlmpack -n __fish_use_subcommand -a {verb.name} -d {_quoted(verb.help, fish=True)}"
        for verb in verbs
    ]
    lines += [f"complete -c vlmpack -n __fish_use_subcommand -l {name}" for name in ("version", "help")]
    for verb in verbs:
        here = f"complete -c vlmpack -n 'string match -q {verb.name} -- (commandline -opc)[2]'"
        for argument in verb.arguments:
            words = _quoted(" ".join(argument.words), fish=True)
            lines.append(f"{here} -a {words}" if argument.words else f"{here} -F")
        for option in verb.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            lines.append(f"{here} {names}{_fish_value(option)} -d {_quoted(option.help, fish=True)}")
    return "\n".join([*lines, ""])


def _fish_value(option: Value) -> str:
    if option.is_flag:
        return ""
    if option.words:
        return f" -x -a {_quoted(' '.join(option.words), fish=True)}"
    return " -x" if option.is_number else " -r -F"


def _quoted(text: str, *, fish: bool = False) -> str:
    """Quote for a shell: in single quotes fish reads backslashes, the others do not."""
    if fish:
        text = text.replace("\\", "\\\\")
    return "'" + text.replace("'", "\\'" if fish else "'\\''") + "'"
