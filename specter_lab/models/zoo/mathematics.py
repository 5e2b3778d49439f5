"""Synthetic mathematics: grade-school templates from a pinned package, and arithmetic of our own."""

import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

from specter_lab.models.zoo.archives import member
from specter_lab.models.zoo.text import Document, normalise

TEMPLATES = 100
PROBLEMS_PER_TEMPLATE = 380
ARITHMETIC_DOCUMENTS = 9000
PROBLEMS_PER_DOCUMENT = 4
PACKAGE_FILES = {
    "reasoning_gym.utils": "reasoning_gym/utils.py",
    "templates_00": "reasoning_gym/arithmetic/gsm_symbolic/generators_00_49.py",
    "templates_50": "reasoning_gym/arithmetic/gsm_symbolic/generators_50_99.py",
}


def template_generators(archive: Path) -> list[Callable]:
    """Load the 100 problem templates from the wheel without installing it."""
    package = types.ModuleType("reasoning_gym")
    package.__path__ = []
    replaced = {name: sys.modules.get(name) for name in ("reasoning_gym", "reasoning_gym.utils")}
    loaded = {}
    try:
        sys.modules["reasoning_gym"] = package
        for name, path in PACKAGE_FILES.items():
            loaded[name] = types.ModuleType(name)
            if name in replaced:
                sys.modules[name] = loaded[name]
            exec(compile(member(archive, path), path, "exec"), loaded[name].__dict__)
    finally:
        for name, before in replaced.items():
            if before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = before
    return [getattr(loaded[f"templates_{i // 50 * 50:02d}"], f"generate_{i}") for i in range(TEMPLATES)]


def template_problems(generate: Callable, count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield (question, worked solution, answer) of one template; some seeds have no solution."""
    for number in range(count):
        try:
            problem = generate(random.Random(seed * 1_000_003 + number), 1.0)
        except (ValueError, ZeroDivisionError, IndexError):
            continue
        yield problem["question"], problem["metadata"]["answer_cot"], problem["answer"]


def mathematics_documents(source_key: str, archive: Path, seed: int) -> Iterator[Document]:
    """Template problems (a template is one unit) and step-by-step arithmetic."""
    for number, generate in enumerate(template_generators(archive)):
        for question, solution, _ in template_problems(generate, PROBLEMS_PER_TEMPLATE, seed):
            text = normalise(f"Question: {question}\nAnswer: {solution}")
            yield Document("mathematics", source_key, f"template-{number:02d}", text)
    rng = random.Random(seed)
    for number in range(ARITHMETIC_DOCUMENTS):
        text = "\n\n".join(arithmetic_problem(rng) for _ in range(PROBLEMS_PER_DOCUMENT))
        yield Document("mathematics", "arithmetic", f"arithmetic-{number}", text)


def arithmetic_problem(rng: random.Random) -> str:
    """A sum of products, worked out term by term."""
    terms = [
        (rng.randint(2, 99), rng.randint(2, 12)) if rng.random() < 0.5 else (rng.randint(2, 999), 1)
        for _ in range(rng.randint(2, 4))
    ]
    signs = [1] + [rng.choice((1, -1)) for _ in terms[1:]]
    shown = [f"{a} * {b}" if b > 1 else f"{a}" for a, b in terms]
    question = shown[0] + "".join(f" {'+' if sign > 0 else '-'} {term}" for sign, term in zip(signs[1:], shown[1:]))
    steps = [f"{a} * {b} = {a * b}" for a, b in terms if b > 1]
    total = terms[0][0] * terms[0][1]
    for sign, (a, b) in zip(signs[1:], terms[1:]):
        after = total + sign * a * b
        steps.append(f"{total} {'+' if sign > 0 else '-'} {a * b} = {after}")
        total = after
    return f"Question: What is {question}?\nAnswer: " + "\n".join(steps) + f"\n#### {total}"
