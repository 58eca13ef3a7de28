"""Launch scripts are read as bash would run them, without running anything."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.planner.launch_script import read_launch


def flags(text: str, **given: str) -> list[str]:
    return list(read_launch(text, given).flags)


def test_arrays_strings_and_arithmetic() -> None:
    text = """
    N=4; GPUS=8
    W=$((N*GPUS + 1))   # 33
    A=(--one 1  # a comment with "quotes"
       --two "a b")
    A+=("--three 3")
    B=" --four $W \\
        --five ${UNSET:-5} "
    B="$B --six"
    python x.py ${A[@]} $B --seven "${A[0]}"
    """
    expected = ["--one", "1", "--two", "a", "b", "--three", "3", "--four", "33", "--five", "5", "--six"]
    assert flags(text) == [*expected, "--seven", "--one"]
    assert flags('A=("--x 1" --y)\npython x.py "${A[@]}"') == ["--x 1", "--y"]


@pytest.mark.parametrize(
    ("test", "holds"),
    [
        ('[ "$A" = "x" ]', True),
        ('[[ "$A" == "y" ]]', False),
        ("[ $N -gt 3 ] && [ $N -le 4 ]", True),
        ("[ $N -gt 4 ] || [[ $A != y ]]", True),
        ("[ -z $NOTHING ]", True),
        ('[ -n "${NOTHING}" ]', False),
        ("[ ! -f some/file ]", False),
        ("! [ $N -eq 5 ]", True),
        ("[ $N -eq 4 -a $A = y ]", False),
        ("grep -q x file", False),
    ],
)
def test_conditions(test: str, holds: bool) -> None:
    text = f"A=x; N=4\nif {test}; then F=--yes; else F=--no; fi\npython x.py $F"
    assert flags(text) == ["--yes" if holds else "--no"]


def test_elif_and_nested_ifs() -> None:
    text = """
    if [ $S -eq 7 ]; then L=32; H=1
    elif [ $S -eq 70 ]; then
        if [ $S -gt 60 ]; then L=80; else L=79; fi
        H=2
    else L=0; fi
    python x.py --layers $L --h $H
    """
    assert flags(text, S="70") == ["--layers", "80", "--h", "2"]
    assert flags(text, S="7") == ["--layers", "32", "--h", "1"]


@pytest.mark.parametrize(
    ("text", "nodes", "gpus"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 4 x.py --a", 4, 8),
        ("torchrun --nproc-per-node=4 x.py --a", None, 4),
        ("python -m torch.distributed.launch --nproc_per_node 2 --nnodes=3 x.py --a", 3, 2),
        ("#SBATCH --nodes=16\n#SBATCH --gres=gpu:h100:8\nsrun python x.py --a", 16, 8),
        ("srun -N 8 --ntasks-per-node=4 python -u x.py --a", 8, 4),
        ("deepspeed --num_nodes 2 --num_gpus 8 x.py --a", 2, 8),
        ("mpirun -np 16 python x.py --a", None, 16),
        ("torchrun --nproc_per_node $(nvidia-smi -L | wc -l) x.py --a", None, None),
    ],
)
def test_launchers_say_how_many(text: str, nodes: int | None, gpus: int | None) -> None:
    found = read_launch(text)
    assert (found.nodes, found.gpus_per_node) == (nodes, gpus)


def test_what_is_exported_and_what_stands_before() -> None:
    found = read_launch('export A=1\nB=2\nC=${D:-3}\nexport C\nE=5 torchrun x.py --f "$NOT_SET"')
    assert found.environment == {"A": "1", "C": "3", "E": "5"}
    assert found.flags == ("--f", "${NOT_SET}")
    assert found.undefined == ("NOT_SET",)


def test_commands_inside_commands() -> None:
    assert flags("c='python x.py --a 1'\neval $c | tee log") == ["--a", "1"]
    assert flags('c="python x.py --a 1"\nsrun -l bash -c "$c --b \\$ID"') == ["--a", "1", "--b", "${ID}"]
    assert flags('c="python x.py --a 1"\nsrun "$c"') == ["--a", "1"]


def test_what_cannot_be_read_is_told() -> None:
    found = read_launch("source env.sh\nfor i in 1 2; do if true; then echo; fi; done\nf() { echo; }\npython x.py --a")
    assert found.passed_over == ("source env.sh", "for", "function")
    with pytest.raises(ConfigError, match="no command with flags"):
        read_launch("echo hello\npython x.py")


def test_here_documents_and_redirections_are_no_flags() -> None:
    text = "cat <<EOF > x.json\n{ --no: 1 }\nEOF\npython x.py --a 1 > log 2>&1 < in\n"
    assert flags(text) == ["--a", "1"]


def test_places_to_fill_in_are_values() -> None:
    text = 'D="0.2 <path one> 0.8 <two>"\nc="python x.py --data $D --vocab <PATH TO vocab.json> --a 1"\n'
    text += 'sh -c "$c" < in 2>&1'
    words = ["--data", "0.2", "<path one>", "0.8", "<two>", "--vocab", "<PATH TO vocab.json>", "--a", "1"]
    assert flags(text) == words
