"""Train the zoo's one tokenizer: byte-level BPE, 2048 entries, digits split one by one.

python -m specter_lab.models.zoo.tokenizer [--corpus DIR] [--out DIR]
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from specter_lab.errors import UserError
from specter_lab.models.zoo.corpus import DEFAULT_DIR, read_documents, read_summary
from specter_lab.models.zoo.shapes import MAX_POSITIONS, VOCAB_SIZE
from specter_lab.paths import ZOO

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2
SAMPLE_BYTES_PER_DOMAIN = 4_000_000
SAMPLE_SEED = 0
TOKENIZER_DIR = ZOO / "tokenizer"


def sample_texts(corpus_dir: Path, bytes_per_domain: int = SAMPLE_BYTES_PER_DOMAIN) -> Iterator[str]:
    """Yield the same amount of training text from every domain."""
    for domain in read_summary(corpus_dir)["mixture"]:
        left_bytes = bytes_per_domain
        for row in read_documents("train", corpus_dir, domain, seed=SAMPLE_SEED):
            if left_bytes <= 0:
                break
            left_bytes -= len(row["text"].encode())
            yield row["text"]


def train_tokenizer(
    texts: Iterator[str], vocab_size: int = VOCAB_SIZE, special_tokens: tuple[str, ...] = SPECIAL_TOKENS
) -> PreTrainedTokenizerFast:
    """Learn the merges and wrap the result for Hugging Face; special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def count_tokens(tokenizer: PreTrainedTokenizerFast, part: str, corpus_dir: Path, domain: str) -> tuple[int, int]:
    """Return (bytes, tokens) of one domain; document ends are not counted."""
    backend, size_bytes, tokens, batch = tokenizer.backend_tokenizer, 0, 0, []
    for row in read_documents(part, corpus_dir, domain):
        batch.append(row["text"])
        if len(batch) == 512:
            tokens += sum(len(encoding) for encoding in backend.encode_batch_fast(batch))
            size_bytes += sum(len(text.encode()) for text in batch)
            batch = []
    tokens += sum(len(encoding) for encoding in backend.encode_batch_fast(batch))
    return size_bytes + sum(len(text.encode()) for text in batch), tokens


def main(arguments: list[str] | None = None) -> int:
    """Command line: train, save, report bytes per token on held-out text and tokens in training text."""
    parser = argparse.ArgumentParser(prog="specter_lab.models.zoo.tokenizer", description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=DEFAULT_DIR, help="corpus folder (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=TOKENIZER_DIR, help="folder to write (default: data/zoo/tokenizer)")
    options = parser.parse_args(arguments)
    try:
        tokenizer = train_tokenizer(tqdm(sample_texts(options.corpus), desc="reading", unit="doc"))
        tokenizer.save_pretrained(options.out)
        domains = read_summary(options.corpus)["mixture"]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{'domain':<15}{'bytes/token held out':>22}{'train MB':>12}{'train Mtok':>12}")
    for domain in domains:
        held_bytes, held_tokens = count_tokens(tokenizer, "heldout", options.corpus, domain)
        train_bytes, train_tokens = count_tokens(tokenizer, "train", options.corpus, domain)
        print(f"{domain:<15}{held_bytes / held_tokens:>22.3f}{train_bytes / 1e6:>12.1f}{train_tokens / 1e6:>12.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
