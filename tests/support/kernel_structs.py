"""Structs of kernel arguments, as their source declares them."""

from __future__ import annotations

import re


def members(text: str, struct: str) -> list[str]:
    """Return the parameters that the members of a struct stand for: those of its bases first, nested structs inline."""
    head = rf"struct {struct.partition('<')[0]}(?: : (?P<bases>[^{{]*))? {{"
    found = re.search(rf"{head}(?:}}|(?P<body>.*?)^}});", text, re.M | re.S)
    if found is None:
        return [f"no struct {struct}"]
    bases = re.findall(r"\w+", re.sub(r"<.*?>", "", found["bases"] or ""))
    found_members = [member for base in bases for member in members(text, base)]
    # Methods and what follows the first of them are no members.
    plain = re.split(r"\n\n|RTK_DEVICE", found["body"] or "")[0]
    for declaration in re.sub(r"//.*", "", plain).split(";")[:-1]:
        declaration = " ".join(declaration.split())
        kind = re.match(r"(?:const )?[\w:]+(?:<[^>]*>)?", declaration)[0]
        for name in declaration[len(kind) :].split(","):
            star, word, size = re.fullmatch(r"\s*(\*?)\s*(\w+)(?:\[(\w+)\])?", name).groups()
            if kind in ("i64", "double") or star:
                numbers = range(int(re.search(rf"\b{size} = (\d+);", text)[1])) if size else [""]
                found_members += [f"{kind}{star} {word}{number}" for number in numbers]
            else:
                found_members += members(text, kind)
    return found_members
