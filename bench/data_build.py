"""How fast is `paceline data build`, beside the bare tokenizer?

    python bench/data_build.py                        # 10 M tokens, 2 cores, 3 rounds
    python bench/data_build.py --cores 16 --one-by-one  # also one process encoding one document at a time

Text: the Python files of the running interpreter's standard library, one document a file, as JSON lines; repeated with
changed identifiers until the token count is reached. Tokenizer: byte-level BPE trained on that text (or --tokenizer).

Compared, in turn, on the same cores:
  bare    `Tokenizer.encode_batch` of the tokenizers library over batches of documents that lie in memory: the calls
          alone, no reading, no JSON, no writing (also `encode_batch_fast`, which leaves out offsets)
  build   the command `paceline data build`, from process start to exit

Wall time is what counts on an idle machine; CPU time is given too, since it says more on a busy one. Memory is the
peak, over samples every 0.1 s, of the sum over all processes of the command: PSS (shared pages counted once) and RSS
(counted in each). One JSON line is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import cut_off
import psutil
import tokenizers

from paceline.data.tokenizer import HFTokenizer
from paceline.data.train_tokenizer import train_tokenizer

BATCH = 256  # documents handed to the bare tokenizer at once; larger batches were not faster

BARE = """
import json, os, sys, time
from tokenizers import Tokenizer
path, texts, method, batch = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
tokenizer = Tokenizer.from_file(path)
documents = [json.loads(line)["text"] for line in open(texts, encoding="utf-8")]
if method == "encode":
    documents = documents[: len(documents) // 10]
wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
if method == "encode":
    for text in documents:
        tokens += len(tokenizer.encode(text, add_special_tokens=False).ids)
else:
    call = getattr(tokenizer, method)
    for start in range(0, len(documents), batch):
        tokens += sum(len(e) for e in call(documents[start : start + batch], add_special_tokens=False))
print(json.dumps([tokens, time.perf_counter() - wall, time.process_time() - cpu]))
"""


def source_files() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:  # the standard library has test files in other encodings
                continue
    return texts


def write_corpus(texts: list[str], tokenizer: HFTokenizer, path: Path, tokens: int) -> None:
    written, copy = 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < tokens:
            for text in texts:
                changed = (
                    text if copy == 0 else text.replace("self", f"self{copy}").replace("return", f"return {copy} or")
                )
                file.write(json.dumps({"text": changed, "id": written}) + "\n")
                written += len(tokenizer.encode_batch([changed])[0]) + 1
                if written >= tokens:
                    break
            copy += 1


def run_bare(tokenizer: Path, corpus: Path, method: str) -> dict[str, float]:
    command = [sys.executable, "-c", BARE, str(tokenizer), str(corpus), method, str(BATCH)]
    tokens, wall, cpu = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"tokens": tokens, "wall": wall, "cpu": cpu}


def run_build(tokenizer: Path, corpus: Path, out: Path, cores: int) -> dict[str, float]:
    code = "from paceline.cli.data import app; app()"
    command = [sys.executable, "-c", code, "build", str(corpus), "--out", str(out), "--tokenizer", str(tokenizer)]
    command += ["--workers", str(cores)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    pss = rss = 0
    while process.poll() is None:
        now = memory(process.pid)
        pss, rss = max(pss, now[0]), max(rss, now[1])
        time.sleep(0.1)
    wall = time.perf_counter() - began
    assert process.stdout is not None
    if process.returncode:
        raise SystemExit(process.stdout.read())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    tokens = json.loads(Path(f"{out}.json").read_text())["tokens"]
    return {"tokens": tokens, "wall": wall, "cpu": cpu, "pss": pss, "rss": rss}


def memory(pid: int) -> tuple[int, int]:
    """(PSS, RSS) of a process and all below it, in bytes."""
    pss = rss = 0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    for process in processes:
        try:
            info = process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
        pss, rss = pss + getattr(info, "pss", 0), rss + info.rss
    return pss, rss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use instead of a trained one")
    parser.add_argument("--one-by-one", action="store_true", help="also one process, one document at a time")
    parser.add_argument("--folder", type=Path, help="keep corpus and tokenizer here for the next run")
    options = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    if len(available) < options.cores:
        raise SystemExit(f"{options.cores} cores asked for, {len(available)} are there")
    os.sched_setaffinity(0, set(available[: options.cores]))

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = options.tokenizer or folder / f"bpe-{options.vocab_size}.json"
        texts = source_files()
        if not tokenizer.exists():
            train_tokenizer(texts, tokenizer, vocab_size=options.vocab_size)
        corpus = folder / f"corpus-{options.tokens}.jsonl"
        if not corpus.exists():
            write_corpus(texts, HFTokenizer(tokenizer), corpus, options.tokens)
        runs: dict[str, list[dict[str, float]]] = {"encode_batch": [], "encode_batch_fast": [], "build": []}
        for _ in range(options.rounds):
            # in turn, so that a change of the machine's load meets all of them
            runs["encode_batch"].append(run_bare(tokenizer, corpus, "encode_batch"))
            runs["build"].append(run_build(tokenizer, corpus, folder / "out", options.cores))
            runs["encode_batch_fast"].append(run_bare(tokenizer, corpus, "encode_batch_fast"))
        if options.one_by_one:
            runs["encode"] = [run_bare(tokenizer, corpus, "encode")]
        print(json.dumps(report(runs, options.cores, corpus)))


def report(runs: dict[str, list[dict[str, float]]], cores: int, corpus: Path) -> dict[str, object]:
    def rate(name: str, clock: str) -> float:
        return statistics.median(run["tokens"] / run[clock] for run in runs[name])

    result: dict[str, object] = {
        "bench": "data_build",
        "tokens": int(runs["build"][0]["tokens"]),
        "corpus_mib": round(corpus.stat().st_size / 2**20, 1),
        "cores": cores,
        "rounds": len(runs["build"]),
    }
    for name in runs:
        result[f"{name}_tokens_per_second"] = round(rate(name, "wall"))
        result[f"{name}_tokens_per_cpu_second"] = round(rate(name, "cpu"))
        walls = [run["wall"] for run in runs[name]]
        result[f"{name}_wall_seconds"] = [round(wall, 2) for wall in walls]
    for name in ("encode_batch", "encode_batch_fast"):
        pairs = zip(runs["build"], runs[name], strict=True)
        result[f"build_over_{name}"] = round(
            statistics.median((b["tokens"] / b["wall"]) / (r["tokens"] / r["wall"]) for b, r in pairs), 3
        )
        result[f"build_over_{name}_cpu"] = round(rate("build", "cpu") / rate(name, "cpu"), 3)
    if "encode" in runs:
        result["build_over_one_by_one"] = round(rate("build", "wall") / rate("encode", "wall"), 2)
    result["peak_pss_mib"] = round(max(run["pss"] for run in runs["build"]) / 2**20)
    result["peak_rss_sum_mib"] = round(max(run["rss"] for run in runs["build"]) / 2**20)
    result["load_average"] = round(os.getloadavg()[0], 1)
    result["versions"] = {"python": platform.python_version(), "tokenizers": tokenizers.__version__}
    return result


if __name__ == "__main__":
    cut_off.run(main)
