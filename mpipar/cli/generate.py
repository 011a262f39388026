"""``mpipar generate``: text from a model, over a paged cache."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpipar.comm import Communicator, init
from mpipar.errors import CountOutOfRange, EmptyInput, UnsupportedArray

if TYPE_CHECKING:
    from mpipar.generate import Generator, Source


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the verb.
    """
    parser.description = (
        "Continue prompts. Example: mpipar run -n 3 generate --model FOLDER --tp 3 --prompt 'Once'"
    )
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="PATH",
        help="run folder, Hugging Face folder, or GGUF file (Llama or GPT-2)")  # fmt: skip
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    add("--tp", type=int, default=1, help="degree of tensor parallelism")
    add("--pp", type=int, default=1, help="pipeline stages; what remains of the ranks are replicas")
    add("--max-tokens", type=int, default=64, help="new tokens of each prompt (default 64)")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    add("--top-k", type=int, default=0, help="draw from so many likeliest tokens; 0 for all")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest with this probability")
    add("--seed", type=int, default=0, help="of the draws; the same text at any degree")
    add("--block-size", type=int, default=16, help="tokens of a cache block (default 16)")
    add("--cache-mib", type=int, default=512, help="of this rank's cache at most (default 512)")
    add("--weights", choices=("float32", "stored"), default="float32",
        help="stored: matrices stay as a GGUF file holds them until they are used")  # fmt: skip
    add("--no-sharing", action="store_true", help="compute equal prefixes again")


def main(arguments: argparse.Namespace) -> int:
    """Generate. Collective over the job.

    Parameters
    ----------
    arguments : argparse.Namespace
        As parsed.

    Returns
    -------
    int
        Exit code 0.
    """
    from mpipar.cli.train import told_once
    from mpipar.distributed_cache import TransferEngine
    from mpipar.generate import Generator, Sampling, build_decoder, open_source
    from mpipar.mesh import Mesh

    comm = init()
    with told_once(comm):
        texts = comm.made_by_root(lambda: _prompts(arguments))
        sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
        mesh = Mesh(comm, pp=arguments.pp, tp=arguments.tp)
        source = open_source(arguments.model)
        prompts = [source.tokenizer.encode(text) for text in texts]
        mine = list(range(len(prompts)))[mesh.coordinate["dp"] :: mesh.degree("dp")]
        n_blocks = _n_blocks(arguments, source, [prompts[i] for i in mine] or [[0]])
        stored = arguments.weights == "stored"
        decoder = build_decoder(mesh, source, n_blocks, arguments.block_size, stored)
        engine = None
        if mesh.degree("dp") == comm.size > 1 and not arguments.no_sharing:
            engine = TransferEngine(comm, decoder.storage)  # replicas fetch each other's blocks
        generator = Generator(decoder, sampling, not arguments.no_sharing, engine=engine)
        shown = _Shown(source, texts, mine, comm.rank == 0 and mesh.degree("dp") == 1)
        new: list[list[int]] = []
        if mine or engine is not None:
            new = generator.generate(
                [prompts[i] for i in mine], arguments.max_tokens, source.tokenizer.stop, shown.token
            )
        if engine is not None:
            engine.close()
        _tell(comm, mesh, source, texts, dict(zip(mine, new, strict=True)), shown)
        _table(comm, generator, mesh)
    return 0


def _prompts(arguments: argparse.Namespace) -> list[str]:
    lines = []
    if arguments.prompts is not None:
        try:
            lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise EmptyInput("--prompts", f"{arguments.prompts}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UnsupportedArray(f"--prompts {arguments.prompts} is no UTF-8: {error}") from None
    texts = [*arguments.prompt, *(line for line in lines if line.strip())]
    if not texts:
        raise EmptyInput("generate", "no prompt; give --prompt TEXT or --prompts FILE")
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # such as bytes of a command line that are no text
            raise UnsupportedArray(
                f"prompt {number} is no UTF-8 text from its character {error.start} on"
            ) from None
    return texts


def _n_blocks(arguments: argparse.Namespace, source: Source, prompts: list[list[int]]) -> int:
    """As many as all texts take, within the cache's limit, and one text at least."""
    size, c = int(arguments.block_size), source.config
    if size < 1:
        raise CountOutOfRange("--block-size", "1 or more", size)
    needs = [-(-(len(p) + int(arguments.max_tokens)) // size) for p in prompts]
    layers = -(-c.n_layers // int(arguments.pp))
    heads = -(-c.kv_heads // int(arguments.tp))
    one = 2 * layers * heads * c.head_width * size * 4
    limit = (int(arguments.cache_mib) << 20) // one
    return max(max(needs) + 1, min(sum(needs) + 1, limit))


class _Shown:
    """Prints the text of a single prompt as it comes."""

    def __init__(self, source: Source, texts: list[str], mine: list[int], prints: bool) -> None:
        self._decode, self._tokens, self._n = source.tokenizer.decode, list[int](), 0
        self.streams = prints and len(mine) == 1
        self._prompt = texts[mine[0]] if self.streams else ""

    def token(self, _: int, token: int) -> None:
        """One more; half a character waits for its rest."""
        if self.streams:
            sys.stdout.write(self._prompt)  # nothing is shown before the first token has come
            self._prompt = ""
            self._tokens.append(token)
            text = self._decode(self._tokens)
            if not text.endswith("\ufffd"):
                sys.stdout.write(text[self._n :])
                sys.stdout.flush()
                self._n = len(text)


def _tell(
    comm: Communicator, mesh: Any, source: Source, texts: list[str],
    new: dict[int, list[int]], shown: _Shown,
) -> None:  # fmt: skip
    """All texts in the order of their prompts, on rank 0."""
    told = comm.all_gather_json([mesh.coordinate, sorted(new.items())])
    found = {number: tokens for _, pairs in told for number, tokens in pairs}
    if comm.rank == 0 and shown.streams:
        print()
    elif comm.rank == 0:
        for number, text in enumerate(texts):
            print(f"--- {number}\n{text}{source.tokenizer.decode(found[number])}")


def _table(comm: Communicator, generator: Generator, mesh: Any) -> None:
    """Figures of all replicas, on rank 0."""
    f, storage = generator.figures, generator.decoder.storage
    first = mesh.coordinate["tp"] == 0 and mesh.coordinate["pp"] == 0
    mine = [f.prompt_tokens, f.skipped_tokens, f.prompt_blocks, f.hit_blocks, f.prefilled,
            f.decoded, f.preemptions, f.peak_blocks, f.fetched_blocks]  # fmt: skip
    rows = comm.all_gather_json([mine if first else [0] * 9, f.prefill_s, f.decode_s])
    if comm.rank:
        return
    sums = [sum(column) for column in zip(*(row[0] for row in rows), strict=True)]
    prefill_s, decode_s = (max(row[i] for row in rows) for i in (1, 2))
    prompt, skipped, blocks, hits, prefilled, decoded, preemptions, peak, fetched = sums
    lines = [
        ("prompt tokens", f"{prompt:,}, {skipped:,} of them skipped"),
        ("prompt blocks", f"{blocks}, {hits} of them hit, {fetched} fetched from other ranks"),
        ("prefill tokens/s", f"{prefilled / prefill_s:,.1f}" if prefill_s else "-"),
        ("decode tokens/s", f"{decoded / decode_s:,.1f}" if decode_s else "-"),
        ("cache of a rank", f"{storage.n_bytes / 2**20:.1f} MiB in {storage.n_blocks} blocks"),
        ("most blocks in use", f"{peak}"),
        ("preemptions", f"{preemptions}"),
    ]
    width = max(len(name) for name, _ in lines)
    print("-" * 48)
    for name, value in lines:
        print(f"{name:{width}}  {value}")
