"""`paceline data`: raw text to datasets, and what is in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.data.prepare import BuildSummary

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.callback()
def _data() -> None:
    """Turn raw text into datasets, and look into them.

    A dataset is PREFIX.bin and PREFIX.idx, byte for byte as Megatron-LM
    writes them, and PREFIX.json, which says what it was made of. Recipes name
    it by PREFIX: data.train = "PREFIX".
    """


Inputs = Annotated[list[str], typer.Argument(help="Files, folders (read recursively) or quoted patterns.")]
Glob = Annotated[str, typer.Option(help="Which files of a folder to read; default: .txt, .jsonl, .parquet, .gz, .zst.")]
JsonKey = Annotated[str, typer.Option(help="Key (jsonl) or column (parquet) that holds the text.")]
SplitLines = Annotated[bool, typer.Option("--split-lines", help="In text files, a line is a document, not the file.")]
TokenizerName = Annotated[
    str, typer.Option("--tokenizer", "-t", help="tokenizer.json, SentencePiece .model, a folder with one, or `byte`.")
]
EodToken = Annotated[str, typer.Option(help="Name of the end-of-document token; default: looked for by common names.")]


def _many(number: int, what: str) -> str:
    """``1 file``, ``2,000 files``"""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@app.command()
def build(
    inputs: Inputs,
    out: Annotated[str, typer.Option("--out", "-o", help="Prefix of the dataset to write.")],
    tokenizer: TokenizerName,
    glob: Glob = "",
    json_key: JsonKey = "text",
    split_lines: SplitLines = False,
    eod: Annotated[bool, typer.Option(help="End each document with the end-of-document token.")] = True,
    eod_token: EodToken = "",
    valid_share: Annotated[
        float, typer.Option(help="Share of the documents to hold out: writes OUT-train and OUT-valid instead of OUT.")
    ] = 0.0,
    dedup: Annotated[
        bool, typer.Option("--dedup", help="Drop documents that repeat an earlier one, exactly or nearly (80 %).")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first document that cannot be read.")] = False,
    max_skipped_share: Annotated[
        float, typer.Option(help="Fail when more than this share of the documents cannot be read.")
    ] = 0.05,
    workers: Annotated[
        int, typer.Option("--workers", "-w", help="Processes; default: one a core.", show_default=False)
    ] = 0,
) -> None:
    """Read raw text, tokenize it in parallel and write a dataset.

    [bold]Inputs.[/bold] A .txt file (or any other text file that is named or matched by
    --glob) is one document; a line of .jsonl is a JSON object with the
    document under --json-key; a row of .parquet likewise. Text and .jsonl may
    be compressed with gzip or zstd.

    [bold]What is skipped.[/bold] Empty documents are counted. Invalid UTF-8, malformed
    JSON, a missing key, a value that is no text, and text with lone
    surrogates are counted and listed with file, line, byte offset and reason
    in OUT.skipped.jsonl. So are documents with a stretch of more than 4
    million characters (SentencePiece: 16 million) without a place to cut.
    --strict stops at the first one instead. Documents of one token are kept.

    [bold]Held-out data.[/bold] Documents (for text files: whole files) are chosen by a
    hash of their text, so a later build makes the same choice. With --dedup
    no near copy of a training document is left among them.

    The result is the same for any number of workers. Memory does not grow
    with the input: about 0.1 GiB for each worker. A single very long
    document adds about seven times its size, and up to 2 GiB where it has no
    place to cut; --dedup adds 2.5 kB for each document.

    [bold]Examples[/bold]

      paceline data build texts/ -o data/texts -t tokenizer.json \\
        --valid-share 0.05 --dedup

      paceline data build "crawl/*.jsonl.zst" -o data/crawl -t llama3/ -w 16

      paceline data build src/ --glob "*.py" -o data/code -t byte
    """
    from paceline.data.prepare import PrepareOptions, build_dataset
    from paceline.data.readers import ReadOptions
    from paceline.data.tokenizer import load_tokenizer
    from paceline.report.console import make_console

    options = PrepareOptions(
        read=ReadOptions(json_key=json_key, split_lines=split_lines),
        glob=glob,
        append_eod=eod,
        strict=strict,
        max_skipped_share=max_skipped_share,
        valid_share=valid_share,
        dedup=dedup,
        workers=workers or _cores(),
    )
    console = make_console(stderr=True)
    with _Bar(console) as bar:
        summary = build_dataset(
            inputs, out, tokenizer=load_tokenizer(tokenizer, eod_token), options=options, progress=bar.show
        )
    _print_summary(make_console(), summary)


class _Bar:
    """A progress line with documents, tokens and tokens/s, on a terminal only.

    Drawn by the caller's own updates: a refreshing thread would forbid the fork of the workers.
    """

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("tokenizing"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, text="")

    def show(self, now: object) -> None:
        from paceline.data.prepare import Progress as State
        from paceline.report import units

        assert isinstance(now, State)
        text = (
            f"{units.count(now.documents)} documents, {units.count(now.tokens)} tokens, "
            f"{units.rate(now.tokens_per_second, 'tokens')}"
        )
        self._progress.update(self._task, completed=now.bytes_done, total=now.bytes_total, text=text, refresh=True)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _print_summary(console: Console, summary: BuildSummary) -> None:
    from paceline.report import units

    for prefix, sidecar in summary.datasets.items():
        console.print(
            f"{prefix}: {_many(sidecar.documents, 'document')}, {_many(sidecar.tokens, 'token')}, "
            f"{sidecar.bytes_per_token:.2f} bytes a token, vocabulary {sidecar.vocab_size:,}",
            markup=False,
        )
    rate = units.rate(summary.tokens / summary.seconds, "tokens")
    console.print(f"{_many(summary.num_files, 'file')} in {units.duration(summary.seconds)}, {rate}")
    total = summary.documents + summary.num_empty + sum(summary.skipped.values())
    if summary.num_empty:
        console.print(f"empty and skipped: {summary.num_empty:,} of {_many(total, 'document')}")
    if summary.num_exact_duplicates or summary.num_near_duplicates:
        exact, near = summary.num_exact_duplicates, summary.num_near_duplicates
        console.print(f"duplicates dropped: {exact:,} exact, {near:,} near")
    if summary.skipped:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(summary.skipped.items()))
        console.print(f"unreadable and skipped: {kinds}; listed in {summary.report}", markup=False, style="yellow")


@app.command()
def inspect(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="Dataset: the path without .bin or .idx. With --task a file or folder of rows."
        ),
    ],
    samples: Annotated[int, typer.Option(min=0, help="Documents to show, spread evenly over the dataset.")] = 3,
    document: Annotated[int, typer.Option(help="Show this document instead; from 0.", show_default=False)] = -1,
    tokens: Annotated[int, typer.Option(help="Tokens to show of each document of a dataset.")] = 60,
    tokenizer: Annotated[
        str, typer.Option(help="A file, a folder, a run or byte; default: the one that the dataset names.")
    ] = "",
    task: Annotated[
        str, typer.Option(help="sft, dpo, orpo, reward, kto or pretrain: show rows as that task learns them.")
    ] = "",
    template: Annotated[
        str, typer.Option(help="Chat template: a name or a Jinja file; default: the tokenizer's own.")
    ] = "",
    mask: Annotated[str, typer.Option(help="What is learned: assistant, last or all.")] = "assistant",
    seq_len: Annotated[int, typer.Option(min=2, help="train.seq_len of the run.")] = 4096,
    packing: Annotated[str, typer.Option(help="pack, none or buckets.")] = "pack",
    batch: Annotated[int, typer.Option(min=1, help="train.global_batch_size of the run.")] = 64,
    cache_dir: Annotated[str, typer.Option(help="Where tokens are kept for the run; default: beside the data.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="With --task: print JSON for programs.")] = False,
) -> None:
    """Show what is in a dataset: documents, tokens, lengths, decoded samples.

    With [bold]--task[/bold], DATA are rows: conversations, preference pairs, judged answers or
    text in .json, .jsonl, .parquet or .txt, a folder of them, or an entry of
    LLaMA-Factory's description, FILE#NAME. Shown are examples as the run
    would learn them, with what is learned in green and between « and »; rows
    that cannot be used, with file, line and reason (the exit status is then
    1); lengths; and how full sequences get.

    [bold]Examples[/bold]

      paceline data inspect data/texts-train

      paceline data inspect data/texts-train --document 17 --tokens 400

      paceline data inspect old/corpus_text_document --tokenizer gpt2/

      paceline data inspect chats.jsonl --task sft --tokenizer llama3/

      paceline data inspect data/dataset_info.json#dpo_en_demo --task dpo \\
        --tokenizer byte --template chatml
    """
    from paceline.cli.data_rows import inspect_rows
    from paceline.config.data import names_rows
    from paceline.errors import DataError

    if task:
        options = {
            "tokenizer": tokenizer,
            "template": template,
            "mask": mask,
            "packing": packing,
            "cache_dir": cache_dir,
        }
        good = inspect_rows(
            [prefix],
            task=task,
            options=options,
            seq_len=seq_len,
            global_batch_size=batch,
            samples=samples,
            example=document,
            as_json=as_json,
        )
        raise typer.Exit(0 if good else 1)
    if names_rows(prefix):
        raise DataError(
            f"{prefix} holds rows, not a dataset of tokens",
            evidence="How rows become tokens depends on what is learned from them.",
            next_step="Say which task: --task sft (or dpo, orpo, reward, kto, pretrain).",
        )
    _inspect_dataset(prefix, samples=samples, document=document, tokens=tokens, tokenizer=tokenizer)


def _inspect_dataset(prefix: str, *, samples: int, document: int, tokens: int, tokenizer: str) -> None:
    from paceline.data.indexed import IndexedDataset
    from paceline.data.inspection import document_tokens, length_report
    from paceline.data.sidecar import read_sidecar
    from paceline.data.tokenizer import load_tokenizer
    from paceline.errors import DataError
    from paceline.report import units
    from paceline.report.console import make_console

    console = make_console()
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(dataset.prefix)
    size = dataset.num_tokens * dataset.dtype.itemsize
    console.print(
        f"{dataset.prefix}: {_many(dataset.num_documents, 'document')} in {_many(len(dataset), 'sequence')}, "
        f"{_many(dataset.num_tokens, 'token')} ({dataset.dtype.name}, {units.size(size)})",
        markup=False,
    )
    lengths = length_report(dataset)
    console.print(f"tokens a document: mean {lengths.mean:,.1f}; percentiles:")
    console.print("  " + "  ".join(f"{_percentile(p)} {value:,}" for p, value in lengths.percentiles.items()))
    if sidecar is not None:
        console.print(
            f"tokenizer {sidecar.tokenizer} (sha256 {sidecar.tokenizer_fingerprint[:12]}): vocabulary "
            f"{sidecar.vocab_size:,}, end of document {sidecar.eod_id}"
            f"{'' if sidecar.eod_appended else ' (not appended)'}, {sidecar.bytes_per_token:.2f} bytes a token",
            markup=False,
        )
    backend = None
    try:
        name = tokenizer or (sidecar.tokenizer if sidecar else "")
        backend = load_tokenizer(name) if name else None
    except DataError as error:
        if tokenizer:
            raise
        console.print(f"no decoding: {error.subject}; name one with --tokenizer", markup=False, style="yellow")
    count = min(samples, dataset.num_documents)
    for number in [document] if document >= 0 else [i * dataset.num_documents // count for i in range(count)]:
        ids = document_tokens(dataset, number, tokens)
        console.print(f"\ndocument {number}:", style="bold")
        text = backend.decode(ids) if backend is not None else " ".join(map(str, ids.tolist()))
        console.print(text, markup=False, soft_wrap=True)


def _percentile(p: int) -> str:
    return {0: "min", 50: "median", 100: "max"}.get(p, f"{p} %")


@app.command()
def verify(
    prefixes: Annotated[list[str], typer.Argument(help="Datasets, without .bin or .idx.")],
    vocab_size: Annotated[
        int,
        typer.Option(
            help="Vocabulary that all ids must lie in; default: the one that the dataset names.", show_default=False
        ),
    ] = 0,
) -> None:
    """Read all of a dataset and fail if anything is wrong.

    Checked: both files are there and whole; magic, version and dtype of the
    index; every pointer and length; the document index; every id against the
    vocabulary; the description beside it (counts, document ends). The exit
    status is 1 at the first fault, which is named with file, value and
    reason.

    [bold]Examples[/bold]

      paceline data verify data/texts-train data/texts-valid

      paceline data verify old/megatron_text_document --vocab-size 50257
    """
    from paceline.data.inspection import verify as verify_dataset
    from paceline.report.console import make_console

    console = make_console()
    for prefix in prefixes:
        facts = verify_dataset(prefix, vocab_size=vocab_size or None)
        checked = f"below {facts.vocab_size:,}" if facts.vocab_size else "not checked against a vocabulary (unknown)"
        console.print(
            f"{facts.prefix}: good. {_many(facts.documents, 'document')}, "
            f"{_many(facts.sequences, 'sequence')}, {_many(facts.tokens, 'token')} ({facts.dtype}); "
            f"largest id {facts.largest_id:,}, {checked}",
            markup=False,
        )


@app.command()
def merge(
    prefixes: Annotated[list[str], typer.Argument(help="Datasets to put one after the other.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Prefix of the dataset to write.")],
    widen: Annotated[
        bool, typer.Option("--widen", help="Accept different dtypes and write the one that holds all.")
    ] = False,
) -> None:
    """Put datasets one after the other, document boundaries included.

    Datasets made by different tokenizers are refused, as far as their
    descriptions tell; so are different dtypes, unless --widen. To mix
    datasets in proportions, name them in the recipe instead: data.train =
    [{path, weight}, ...].

    [bold]Example[/bold]

      paceline data merge data/part-1 data/part-2 --out data/all
    """
    from paceline.data.merging import merge_datasets
    from paceline.report.console import make_console

    merged = merge_datasets(prefixes, out, widen=widen)
    make_console().print(
        f"{merged.prefix}: {_many(merged.num_documents, 'document')}, {_many(merged.num_tokens, 'token')} "
        f"({merged.dtype.name})",
        markup=False,
    )


@app.command("train-tokenizer")
def train_tokenizer(
    inputs: Inputs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The tokenizer.json to write.")],
    vocab_size: Annotated[int, typer.Option(help="Ids in all: 256 bytes, the end of a document, and merges.")] = 8192,
    glob: Glob = "",
    json_key: JsonKey = "text",
    split_lines: SplitLines = False,
) -> None:
    """Train a byte-level BPE tokenizer on raw text.

    It reads the same inputs as `build` and uses all cores. Any text can be
    encoded and decoded exactly. The same inputs give the same file.
    Unreadable documents are left out; `build` reports them.

    [bold]Example[/bold]

      paceline data train-tokenizer texts/ --out tokenizer.json --vocab-size 8000
    """
    from paceline.data.readers import ReadOptions, find_files, texts
    from paceline.data.train_tokenizer import train_tokenizer as train
    from paceline.report.console import make_console

    files = find_files(inputs, glob)
    documents = texts(files, ReadOptions(json_key=json_key, split_lines=split_lines))
    tokenizer = train(documents, out, vocab_size=vocab_size)
    console = make_console()
    console.print(f"{out}: vocabulary {tokenizer.vocab_size:,}, from {_many(len(files), 'file')}", markup=False)
    if tokenizer.vocab_size < vocab_size:
        console.print(
            f"--vocab-size {vocab_size:,} was not reached: the text gives only {tokenizer.vocab_size:,}; take "
            "more text or a smaller --vocab-size",
            markup=False,
            style="yellow",
        )
