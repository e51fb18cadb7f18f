"""PTX text to instructions: one entry, its registers, its labels."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_TOKEN = re.compile(
    r"\s+|//[^\n]*|/\*.*?\*/"
    r'|(?P<string>"[^"\n]*")'
    r"|(?P<number>-?(?:0[fF][0-9A-Fa-f]{8}|0[dD][0-9A-Fa-f]{16}|0[xX][0-9A-Fa-f]+|[0-9]+)[uU]?)"
    r"|(?P<word>[%$A-Za-z_.][\w$.]*(?:::\w[\w$.]*)*)"
    r"|(?P<sign>[{}\[\](),;:@!<>|+=-])",
    re.DOTALL,
)


class PtxError(Exception):
    """A program that the machine cannot run, or that did what it may not do."""


class Register(NamedTuple):
    """A register by its unique name."""

    name: str


class Immediate(NamedTuple):
    """A constant: an integer, or the bits of a floating-point number of `width` bits."""

    value: int
    width: int | None = None


class Address(NamedTuple):
    """A place in memory: a register, a symbol or nothing, plus a number of bytes."""

    base: Register | str | None
    offset: int


class Vector(NamedTuple):
    """Operands in braces."""

    items: tuple[Register | Immediate | str, ...]


Operand = Register | Immediate | Address | Vector | str
"""What an instruction works on; a plain string is a symbol, label or special register."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
        line: of the text, from 1.
        text: as written, blanks apart.
        opcode: the parts of its name, `("ld", "global", "b32")`.
        operands: destination first.
        guard: register of its predicate and whether it is negated, or None.
    """

    line: int
    text: str
    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None = None


@dataclass(kw_only=True)
class Program:
    """The entry of a PTX module.

    Attributes:
        name: of the entry.
        parameters: type ("u64", "f32") of each parameter by name, in order.
        registers: type ("b32", "pred") of each register by name.
        instructions: in order.
        labels: index into `instructions` by name.
        shared: names of the arrays in dynamic shared memory.
    """

    name: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)


class _Token(NamedTuple):
    text: str
    line: int
    kind: str


def parse(text: str) -> Program:
    """Returns the one entry of a PTX module.

    Raises:
        PtxError: the text is none, or has something that is not modelled.
    """
    return _Parser(text).module()


def _tokens(text: str) -> list[_Token]:
    tokens, at, line = [], 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise PtxError(f"line {line}: no PTX: {text[at : at + 40]!r}")
        if match.lastgroup:
            tokens.append(_Token(match.group(), line, match.lastgroup))
        line += match.group().count("\n")
        at = match.end()
    return tokens


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0
        self.program = Program()
        # Innermost scope last: names as written to unique names.
        self.scopes: list[dict[str, str]] = [{}]
        self.scope_count = 0
        self.prefixes: dict[str, str] = {}

    def module(self) -> Program:
        while self.at < len(self.tokens):
            token = self.next()
            if token.text in (".version", ".target", ".address_size"):
                while self.tokens[self.at].line == token.line:
                    self.at += 1
            elif token.text == ".extern":
                words = self.until(";")
                self.program.shared.add(words[-3].text)
            elif token.text == ".visible":
                continue
            elif token.text == ".entry":
                self.entry()
            else:
                raise self.error(token, "not expected outside an entry")
        if not self.program.instructions:
            raise PtxError("the PTX has no entry")
        return self.program

    def entry(self) -> None:
        name = self.next().text
        if self.program.name:
            raise PtxError(f"two entries: {self.program.name}, {name}")
        self.program.name = name
        self.expect("(")
        while (token := self.next()).text != ")":
            if token.text == ".param":
                parameter = self.until(",", ")")
                if "[" in [word.text for word in parameter]:
                    raise self.error(token, "parameters that are arrays are not modelled")
                self.program.parameters[parameter[-1].text] = parameter[0].text[1:]
                self.at -= self.tokens[self.at - 1].text == ")"
        while self.next().text != "{":  # .reqntid and the like
            pass
        self.body()
        for instruction in self.program.instructions:
            for operand in instruction.operands:
                if instruction.opcode[0] == "bra" and operand not in self.program.labels:
                    raise PtxError(f"line {instruction.line}: no label {operand}")

    def body(self) -> None:
        while True:
            token = self.next()
            if token.text == "}":
                if len(self.scopes) == 1:
                    return
                self.scopes.pop()
            elif token.text == "{":
                self.scope_count += 1
                self.scopes.append({})
                self.declare_labels()
            elif token.text == ".reg":
                self.declare(self.until(";"))
            elif token.text == ".pragma":
                self.until(";")
            elif self.tokens[self.at].text == ":":
                self.at += 1
                label = self.scopes[-1].get(token.text, token.text)
                self.program.labels[label] = len(self.program.instructions)
            else:
                self.at -= 1
                self.program.instructions.append(self.instruction(self.until(";")))

    def declare_labels(self) -> None:
        """Labels of a block in braces are its own, and may be used before they come."""
        depth, at = 1, self.at
        while depth:
            token, following = self.tokens[at], self.tokens[at + 1]
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            if depth == 1 and token.kind == "word" and following.text == ":":
                self.scopes[-1][token.text] = f"{token.text}@{self.scope_count}"
            at += 1

    def declare(self, words: list[_Token]) -> None:
        kind, names = words[0].text[1:], words[1:]
        at = 0
        while at < len(names):
            name = names[at].text
            if at + 1 < len(names) and names[at + 1].text == "<":
                for i in range(int(names[at + 2].text)):
                    self.program.registers[f"{name}{i}"] = kind
                at += 4
            else:
                unique = f"{name}@{self.scope_count}" if len(self.scopes) > 1 else name
                self.scopes[-1][name] = unique
                self.program.registers[unique] = kind
                at += 1
            at += 1  # the comma

    def instruction(self, words: list[_Token]) -> Instruction:
        first, text = words[0], " ".join(word.text for word in words)
        guard = None
        if words[0].text == "@":
            negated = words[1].text == "!"
            name = words[1 + negated]
            register = self.operand_of(name)
            if not isinstance(register, Register):
                raise self.error(name, "a predicate was expected")
            guard = (register, negated)
            words = words[2 + negated :]
        opcode = tuple(words[0].text.split("."))
        return Instruction(
            line=first.line,
            text=text,
            opcode=opcode,
            operands=tuple(self.operands(words[1:])),
            guard=guard,
        )

    def operands(self, words: list[_Token]) -> list[Operand]:
        found: list[Operand] = []
        at = 0
        while at < len(words):
            token = words[at]
            if token.text in "[{":
                end = at + [w.text for w in words[at:]].index("]" if token.text == "[" else "}")
                inside = words[at + 1 : end]
                found.append(
                    self.address(inside)
                    if token.text == "["
                    else Vector(tuple(self.operand_of(w) for w in inside if w.text != ","))
                )
                at = end + 1
            else:
                found.append(self.operand_of(token))
                at += 1
            if at < len(words) and words[at].text not in (",", "|"):
                raise self.error(words[at], "a comma was expected")
            at += 1
        return found

    def address(self, words: list[_Token]) -> Address:
        base: Register | str | None = None
        offset = 0
        for word in words:
            if word.kind == "number":
                offset += int(word.text, 0)
            elif word.text != "+":
                operand = self.operand_of(word)
                if not isinstance(operand, Register | str):
                    raise self.error(word, "an address was expected")
                base = operand
        return Address(base, offset)

    def operand_of(self, token: _Token) -> Register | Immediate | str:
        if token.kind == "number":
            digits = token.text.rstrip("uU")
            if digits[:2].lower() in ("0f", "0d"):
                return Immediate(int(digits[2:], 16), 32 if digits[1] in "fF" else 64)
            return Immediate(int(digits, 0))
        if token.kind != "word":
            raise self.error(token, "an operand was expected")
        for scope in reversed(self.scopes):
            if token.text in scope:
                unique = scope[token.text]
                return Register(unique) if unique in self.program.registers else unique
        if token.text in self.program.registers:
            return Register(token.text)
        return token.text

    def next(self) -> _Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def until(self, *ends: str) -> list[_Token]:
        start = self.at
        while self.next().text not in ends:
            pass
        return self.tokens[start : self.at - 1]

    def expect(self, text: str) -> None:
        if (token := self.next()).text != text:
            raise self.error(token, f"{text} was expected")

    @staticmethod
    def error(token: _Token, problem: str) -> PtxError:
        return PtxError(f"line {token.line}: {token.text}: {problem}")
