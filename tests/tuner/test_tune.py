"""The loop over trials, with a simulated machine in place of processes: budget, resume, repeats, results."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.load import load_recipe, validate
from paceline.config.run import RunConfig
from paceline.errors import ConfigError, RunFolderError, TrainingError
from paceline.planner.calibration import read_calibration
from paceline.report import units
from paceline.tuner.ask import Ask, make_ask
from paceline.tuner.journal import Journal
from paceline.tuner.processes import Runner
from paceline.tuner.run import Answer, run_ask
from paceline.tuner.space import key_of
from paceline.tuner.trial import Ended, Trial
from tests.report.pages import assert_readable
from tests.tuner.simulated import SPACES, Simulated, two_h200s


def ask(out: Path, *, number: int = 0, budget: str = "60m", **more: object) -> Ask:
    recipe, ranks, overrides, vary = SPACES[number]
    texts = [f"{key}={','.join(str(value).lower() for value in values)}" for key, values in vary.items()]
    asked: dict[str, object] = {
        "ranks": ranks, "budget": budget, "objective": "tokens", "speed": 0.9, "allow": (), "vary": texts, "hold": (),
        "out": out, "pause_after": "", "trials": 200, "steps": 0, "machine": two_h200s(ranks),
    }  # fmt: skip
    return make_ask(recipe, list(overrides), **{**asked, **more})  # type: ignore[arg-type]


def simulated(seed: int = 0, **options: float) -> Callable[[Journal, Ask], Runner]:
    """A runner whose noise goes on where an earlier call left off."""

    def runner_of(journal: Journal, asked: Ask) -> Runner:
        defaults: dict[str, float] = {"faults": 0.0, "wrong_losses": 0.0}
        runner = Simulated(asked.space, seed, **{**defaults, **options})  # type: ignore[arg-type]
        runner.number = len(journal.trials)
        return runner

    return runner_of


def test_a_whole_call(tmp_path: Path) -> None:
    told: list[str] = []
    asked = ask(tmp_path / "t")
    answer = run_ask(asked, tell=told.append, runner_of=simulated())
    result = answer.result
    assert answer.stopped == "done"
    assert result.gain is not None and result.gain.times > 1.2 and result.repeated
    assert result.gain.repeats == (2, 2), "base and best have run twice"
    # everything that is told is what the journal holds
    lines = [json.loads(line) for line in (tmp_path / "t" / "trials.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(len(lines))) and len(told) == 2 * len(lines)
    seconds = {key_of(t.changes): [] for t in result.trials}  # type: ignore[var-annotated]
    for trial in result.trials:
        if trial.is_good:
            seconds[key_of(trial.changes)].append(trial.step_seconds)
    base, best = (seconds[key_of(changes)] for changes in ({}, result.best.changes))
    assert result.gain.times == pytest.approx(sum(base) / sum(best))
    product = 1.0
    for rung in result.rungs:
        product *= rung.obtained
    assert product == pytest.approx(result.gain.times), "the ladder's steps make up the whole"
    # the recipe can be run, and differs from the base in what is told alone
    written = load_recipe(tmp_path / "t" / "best.toml").config
    assert result.config == asked.space.point(result.best.changes).config  # type: ignore[union-attr]
    base_run = asked.space.base.run
    assert written.run.folder == f"{base_run.folder}-tuned" != base_run.folder, "no run folder is shared with the base"
    assert written.model_copy(update={"run": base_run}) == result.config
    begun = [line for line in told if "a step," not in line]
    assert all(re.search(r"; takes about \d", line) for line in begun), begun
    assert "of its step in" in begun[1] and "`plan` saves" in begun[1], begun[1]
    data = json.loads((tmp_path / "t" / "result.json").read_text())
    assert data["gain"] == pytest.approx(result.gain.times) and data["findings"][0]["id"] == "tune.gain"
    profile = read_calibration(tmp_path / "t" / "calibration.toml")["paceline"]
    assert profile.gemm_efficiency != asked.space.machine.profile.gemm_efficiency
    assert set(answer.data) >= {"findings", "ladder", "trials", "base", "best", "changes", "neutrality", "noise"}


def test_a_call_that_is_cut_off_loses_the_trial_at_work_alone(tmp_path: Path) -> None:
    whole = run_ask(ask(tmp_path / "whole"), runner_of=simulated(seed=1))

    class Cut(Simulated):
        def run(self, number: int, config: RunConfig, *, limit_seconds: float) -> Ended:
            if self.number >= 3:
                raise KeyboardInterrupt
            return super().run(number, config, limit_seconds=limit_seconds)

    with pytest.raises(KeyboardInterrupt):
        run_ask(
            ask(tmp_path / "cut"),
            runner_of=lambda journal, asked: Cut(asked.space, 1, faults=0.0, wrong_losses=0.0),
        )
    assert len((tmp_path / "cut" / "trials.jsonl").read_text().splitlines()) == 3
    again = run_ask(ask(tmp_path / "cut"), runner_of=simulated(seed=1))
    assert [trial.changes for trial in again.result.trials] == [trial.changes for trial in whole.result.trials]
    assert again.data["gain"] == whole.data["gain"]


def test_a_half_written_line_is_told_and_not_counted(tmp_path: Path) -> None:
    run_ask(ask(tmp_path, trials=4), runner_of=simulated())
    path = tmp_path / "trials.jsonl"
    text = path.read_text()
    path.write_text(text[: len(text) - 40])
    told: list[str] = []
    answer = run_ask(ask(tmp_path, trials=6), tell=told.append, runner_of=simulated())
    assert any("1 lines of trials.jsonl cannot be read" in line for line in told)
    numbers = [trial.number for trial in answer.result.trials]
    assert len(set(numbers)) == len(numbers), "the folder of the lost trial is not taken for another"
    again = Journal(tmp_path)
    with again.claim(answer.space.base, device="NVIDIA H200", ranks=2, warm_up=3, steps=8):
        assert [trial.number for trial in again.trials] == numbers and again.lost == 1


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("ended", "measured"), None),
        (("ended", "measured", "seconds_by_step"), []),
        (("ended", "measured", "seconds_by_step"), [0.0]),
        (("ended", "measured", "seconds_by_step"), [float("nan")]),
        (("ended", "measured", "peak_bytes"), float("inf")),
        (("changes",), {"foo.bar": 1}),
        (("outcome",), "memory"),
    ],
)
def test_a_line_that_cannot_be_true_is_lost(tmp_path: Path, at: tuple[str, ...], value: object) -> None:
    run_ask(ask(tmp_path, trials=3), runner_of=simulated())
    path = tmp_path / "trials.jsonl"
    first, second, third = path.read_text().splitlines()
    line = inner = json.loads(second)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    path.write_text("\n".join([first, json.dumps(line), third]) + "\n")
    told: list[str] = []
    answer = run_ask(ask(tmp_path, trials=3), tell=told.append, runner_of=simulated())
    assert any("1 lines of trials.jsonl cannot be read" in line for line in told)
    assert answer.result.base is not None


def test_a_base_whose_line_is_lost_is_measured_again(tmp_path: Path) -> None:
    run_ask(ask(tmp_path, trials=3), runner_of=simulated(seed=2))
    path = tmp_path / "trials.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{", *lines[1:]]) + "\n")
    spent = run_ask(ask(tmp_path, trials=2), runner_of=simulated(seed=2))
    assert spent.result.base is None and spent.findings[0].id == "tune.base-lost"
    again = run_ask(ask(tmp_path, trials=6), runner_of=simulated(seed=2))
    assert again.result.base is not None and not again.result.trials[2].changes


def test_the_budget_is_of_all_calls_and_more_of_it_goes_on(tmp_path: Path) -> None:
    first = run_ask(ask(tmp_path, budget="6m"), runner_of=simulated(seed=2))
    assert first.stopped == "budget" and first.result.seconds <= 6 * 60
    counts = len(first.result.trials)
    same = run_ask(ask(tmp_path, budget="6m"), runner_of=simulated(seed=2))
    assert len(same.result.trials) == counts, "its time is over"
    more = run_ask(ask(tmp_path, budget="60m"), runner_of=simulated(seed=2))
    assert len(more.result.trials) > counts and more.stopped == "done"


def test_time_is_kept_for_the_repeats(tmp_path: Path) -> None:
    """The search stops while base and best can still be repeated: no gain is left unconfirmed for lack of time."""
    answer = run_ask(ask(tmp_path, budget="9m"), runner_of=simulated(seed=3))
    assert answer.result.gain is not None and answer.result.repeated and answer.result.seconds <= 9 * 60


def test_a_gain_of_single_trials_says_so(tmp_path: Path) -> None:
    answer = run_ask(ask(tmp_path, trials=2), runner_of=simulated())
    assert answer.stopped == "trials" and answer.result.gain is not None and not answer.result.repeated
    assert "It is of single trials" in answer.findings[0].evidence


def test_no_time_for_the_first_trial(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no trial was started"):
        run_ask(ask(tmp_path, budget="5s"), runner_of=simulated())
    assert not (tmp_path / "best.toml").exists()
    assert run_ask(ask(tmp_path, trials=1), runner_of=simulated()).result.gain is None, "the folder can still be used"


def test_pause_ends_a_call_and_the_next_goes_on(tmp_path: Path) -> None:
    class Slow(Simulated):
        """Its clock is the test's."""

        def run(self, number: int, config: RunConfig, *, limit_seconds: float) -> Ended:
            ended = super().run(number, config, limit_seconds=limit_seconds)
            now[0] += ended.seconds
            return ended

    from paceline.tuner.tune import Tuning

    now = [0.0]
    asked = ask(tmp_path)
    asked = replace(asked, limits=replace(asked.limits, call_seconds=200.0))
    journal = Journal(tmp_path)
    for call in range(20):
        with journal.claim(asked.space.base, device="x", ranks=2, warm_up=3, steps=8):
            began = now[0]
            runner = Slow(asked.space, 0, faults=0.0, wrong_losses=0.0)
            tuning = Tuning(
                asked.space, asked.goal, journal, runner, steps=11, limits=asked.limits, clock=lambda: now[0]
            )
            stopped = tuning.run()
            assert now[0] - began <= 200
        journal = Journal(tmp_path)
        if stopped == "done":
            break
        assert stopped == "pause", call
    assert stopped == "done" and call > 0


def test_a_recipe_that_crashes_is_not_tuned(tmp_path: Path) -> None:
    class Broken(Simulated):
        def run(self, number: int, config: RunConfig, *, limit_seconds: float) -> Ended:
            return Ended(seconds=9.0, failure="crash", reason="exit code 1: RuntimeError: no kernel image")

    for _ in range(2):  # a second call says the same
        with pytest.raises(TrainingError, match="does not run") as raised:
            run_ask(ask(tmp_path), runner_of=lambda journal, asked: Broken(asked.space, 0))
        assert "no kernel image" in raised.value.evidence and "trials/000/log" in raised.value.evidence


def test_a_recipe_far_too_large_is_not_even_started(tmp_path: Path) -> None:
    asked = ask(
        tmp_path, vary=("parallel.recompute=none,selective",),
    )  # fmt: skip
    large = load_recipe("recipes/llama3_8b.toml", ["train.micro_batch_size=16", "train.global_batch_size=32"]).config
    space = replace(asked.space, base=large)
    told: list[str] = []
    with pytest.raises(TrainingError, match="nor anything near it"):
        run_ask(replace(asked, space=space), tell=told.append, runner_of=simulated())
    assert "not started: predicted to need" in told[1]


def test_other_recipes_and_machines_are_refused(tmp_path: Path) -> None:
    run_ask(ask(tmp_path, trials=1), runner_of=simulated())
    with pytest.raises(RunFolderError, match="another recipe") as raised:
        run_ask(ask(tmp_path, number=2), runner_of=simulated())
    assert "parallel" in raised.value.evidence or "model" in raised.value.evidence
    asked = ask(tmp_path)
    other = replace(asked.space, machine=replace(asked.space.machine, name="NVIDIA L40S"))
    with pytest.raises(RunFolderError, match="other machines"):
        run_ask(replace(asked, space=other), runner_of=simulated())


def test_a_name_or_where_the_run_is_written_do_not_matter(tmp_path: Path) -> None:
    run_ask(ask(tmp_path, trials=1), runner_of=simulated())
    asked = ask(tmp_path, trials=1)
    run = asked.space.base.run.model_copy(update={"name": "other"})
    space = replace(asked.space, base=asked.space.base.model_copy(update={"run": run}))
    assert len(run_ask(replace(asked, space=space), runner_of=simulated()).result.trials) == 1


def test_damaged_heads_and_foreign_folders(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text("{")
    with pytest.raises(RunFolderError, match="cannot be read"):
        run_ask(ask(tmp_path), runner_of=simulated())
    (tmp_path / "tune.json").unlink()
    (tmp_path / "trials.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="what they are of is unknown"):
        run_ask(ask(tmp_path), runner_of=simulated())
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        run_ask(ask(file / "below"), runner_of=simulated())


def test_two_calls_at_once(tmp_path: Path) -> None:
    asked = ask(tmp_path)

    def inside(journal: Journal, of: Ask) -> Runner:
        with pytest.raises(RunFolderError, match="another `paceline tune` is at work"):
            run_ask(ask(tmp_path), runner_of=simulated())
        return simulated()(journal, of)

    run_ask(replace(asked, limits=replace(asked.limits, trials=1)), runner_of=inside)


# ---- what is asked


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"budget": "20"}, "--budget 20 is no time"),
        ({"budget": "0m"}, "no time"),
        ({"pause_after": "soon"}, "--pause-after soon is no time"),
        ({"objective": "speed"}, "--objective speed is not known"),
        ({"allow": ("speed",)}, "--allow speed is not known"),
        ({"vary": ("train.global_batch_size=8,16",)}, "changes what a step learns from"),
        ({"vary": ("parallel.tp=7",)}, "no recipe with 7 may run on 2 ranks"),
        ({"vary": ("train.micro_batchsize=1",)}, "there is no such setting"),
        ({"vary": ("train.micro_batch_size",)}, "not of the form"),
        ({"vary": ("train.micro_batch_size=big",)}, "micro_batch_size"),
        ({"vary": ("parallel.recompute=nothing",)}, "recompute"),
        ({"hold": ("optim.lr",)}, "trials do not change that setting"),
    ],
)
def test_bad_words_are_refused_before_anything_starts(tmp_path: Path, more: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        ask(tmp_path / "none", **more)
    assert raised.value.next_step and not (tmp_path / "none").exists()


def test_times() -> None:
    from paceline.tuner.ask import seconds_of

    assert [seconds_of("--budget", text) for text in ("90s", "20m", "1h30m", "1.5h")] == [90, 1200, 5400, 5400]


def test_a_recipe_that_may_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tp"):
        make_ask(
            "recipes/tiny.toml", ["parallel.tp=3"], ranks=2, budget="1m", objective="tokens", speed=0.9, allow=(),
            vary=(), hold=(), out=tmp_path, pause_after="", trials=1, steps=0,
        )  # fmt: skip


def test_values_with_commas_are_one_value(tmp_path: Path) -> None:
    asked = ask(tmp_path, vary=('parallel.recompute=none,["full", "none"]', "train.micro_batch_size=1,2"))
    assert asked.space.vary == {
        "parallel.recompute": ("none", ("full", "none")),
        "train.micro_batch_size": (1, 2),
    }


def test_values_are_those_of_a_recipe(tmp_path: Path) -> None:
    asked = ask(tmp_path, vary=("parallel.compile=no,yes", "train.micro_batch_size=2.0,'1'"))
    assert asked.space.vary == {"parallel.compile": (False, True), "train.micro_batch_size": (2, 1)}
    assert all(type(value) is int for value in asked.space.vary["train.micro_batch_size"])


def test_held_settings_stay(tmp_path: Path) -> None:
    asked = ask(tmp_path, hold=("parallel.recompute",))
    answer = run_ask(asked, runner_of=simulated())
    assert all("parallel.recompute" not in trial.changes for trial in answer.result.trials)


def test_long_steps_get_short_trials(tmp_path: Path) -> None:
    assert (ask(tmp_path).warm_up, ask(tmp_path).steps) == (3, 8)
    assert ask(tmp_path, steps=20).steps == 20
    long = make_ask(
        "recipes/llama3_8b.toml", ["train.global_batch_size=512"], ranks=2, budget="1h", objective="tokens",
        speed=0.9, allow=(), vary=(), hold=(), out=tmp_path, pause_after="", trials=1, steps=0, machine=two_h200s(),
    )  # fmt: skip
    assert (long.warm_up, long.steps) == (2, 3)


# ---- what is written


def whole_answer(tmp_path: Path, **options: float) -> tuple[Answer, Ask]:
    asked = ask(tmp_path)
    return run_ask(asked, runner_of=simulated(seed=6, **options)), asked


def test_everything_is_said_of_failures(tmp_path: Path) -> None:
    from paceline.tuner import page, show

    class Cracked(Simulated):
        def crashes(self, changes: object) -> bool:
            return isinstance(changes, dict) and changes.get("parallel.compile") is True

    asked = ask(tmp_path)
    answer = run_ask(asked, runner_of=lambda journal, of: Cracked(of.space, 1, wrong_losses=0.0))
    found = next(one for one in answer.findings if one.id == "tune.fails-here")
    assert found.subject == "parallel.compile = true does not work here"
    assert "RuntimeError: of this machine" in found.evidence and "false" in found.next_step
    text = "\n".join(table.to_text() for table in show.tables(answer.result, answer.space))
    assert "failed: exit code 1: RuntimeError: of this machine" in text
    text = page.page(answer.result, answer.space, answer.findings, "Tuning")
    assert "does not work here" in text and text.count("<circle") == sum(one.is_good for one in answer.result.trials)
    assert_readable(text)


def test_the_recipe_says_what_was_changed(tmp_path: Path) -> None:
    answer, _ = whole_answer(tmp_path)
    text = (tmp_path / "best.toml").read_text()
    for key in answer.result.changes:
        assert f"#   {key} = " in text
    written = validate(tomllib.loads(text))
    assert written.run.name == f"{answer.result.config.run.name}-tuned"
    assert written.model_copy(update={"run": answer.result.config.run}) == answer.result.config


def test_what_is_faster_within_noise_alone_is_said_to_be(tmp_path: Path) -> None:
    from paceline.tuner import show

    answer, asked = whole_answer(tmp_path)
    result = answer.result
    assert result.base is not None
    measured = result.base.ended.measured
    assert measured is not None

    def like_base(times: float) -> Trial:
        seconds = tuple(one / times for one in measured.seconds_by_step)
        ended = replace(result.base.ended, measured=replace(measured, seconds_by_step=seconds))  # type: ignore[union-attr]
        return replace(result.base, number=99, changes={"train.gc_interval": 7}, ended=ended)  # type: ignore[type-var]

    def last_line(times: float) -> str:
        one = like_base(times)
        trials = (result.base, one)
        of = replace(result, rungs=(), best=result.base, trials=trials, others=((one, ()),))  # type: ignore[arg-type]
        table = show.tables(of, asked.space)[-1]
        assert table.title == "Tried, and not taken"
        return str(table.to_text().splitlines()[-1])

    assert "but within noise" in last_line(1 + result.noise)
    assert "but repeats did not confirm it" in last_line(1 + 10 * result.noise)
    assert "noise" not in last_line(0.9) and "faster" not in last_line(0.9)


def test_rows_of_the_ladder_divide_to_what_was_obtained(tmp_path: Path) -> None:
    """Means over repeats in every row, not of the first trial here and of all there."""
    from paceline.tuner import show

    answer, asked = whole_answer(tmp_path)
    result = answer.result
    assert result.base is not None and result.base_value is not None
    assert result.repeated and result.rungs[-1].trial is result.best
    best = result.best
    assert best.even_seconds != pytest.approx(result.best_value, rel=1e-6), "repeats differ"

    def slower(trial: Trial) -> Trial:
        """Repeats of the best that are twice as slow, so that no rounding hides which of them a row is of."""
        if trial.changes != best.changes or trial.number == best.number:
            return trial
        measured = trial.ended.measured
        assert measured is not None
        seconds = tuple(2 * one for one in measured.seconds_by_step)
        return replace(trial, ended=replace(trial.ended, measured=replace(measured, seconds_by_step=seconds)))

    trials = tuple(map(slower, result.trials))
    values = [one.even_seconds for one in trials if one.changes == best.changes]
    mean = sum(values) / len(values)
    assert mean > 1.3 * best.even_seconds
    table = next(one for one in show.tables(replace(result, trials=trials), asked.space) if one.title == "Ladder")
    shown = units.rate(show.tokens_per_second(asked.space, mean), "tokens")
    assert shown in table.to_text()
    assert "means over all trials of a recipe" in " ".join(table.notes)


def test_findings_whose_change_is_in_force_are_not_told(tmp_path: Path) -> None:
    from paceline.tuner import show

    answer, _ = whole_answer(tmp_path)
    result = answer.result
    interval = result.config.train.gc_interval

    def told_of(value: int) -> list[str]:
        finding = {
            "id": "explain.garbage-collection", "severity": "warning", "subject": "collection", "evidence": "",
            "next_step": f"--set train.gc_interval={value} collects rarely.", "gain": None,
        }  # fmt: skip
        best = replace(result.best, ended=replace(result.best.ended, findings=(finding,)))
        found = show.findings(replace(result, best=best), "done", "best.toml")
        return [one.id for one in found if one.id == "explain.garbage-collection"]

    assert told_of(interval) == [] and len(told_of(interval + 1)) == 1


def test_trials_of_a_wider_search_do_not_win(tmp_path: Path) -> None:
    """A folder that was filled with `--allow precision`, taken up without it."""
    vary = ("train.precision=bf16,fp8", "parallel.recompute=none,full")
    wide = run_ask(ask(tmp_path, vary=vary, allow=("precision",)), runner_of=simulated(seed=8))
    assert wide.result.neutrality == "precision" and wide.result.changes["train.precision"].after == "fp8"
    narrow = run_ask(ask(tmp_path, vary=vary), runner_of=simulated(seed=8))
    assert "train.precision" not in narrow.result.changes and narrow.result.gain is not None
    assert narrow.data["gain"] < wide.data["gain"]
    held = run_ask(ask(tmp_path, vary=vary, hold=("parallel.recompute",)), runner_of=simulated(seed=8))
    assert not held.result.changes


def test_a_trial_that_outlasts_its_call_is_not_blamed(tmp_path: Path) -> None:
    class Endless(Simulated):
        def run(self, number: int, config: RunConfig, *, limit_seconds: float) -> Ended:
            if self.number == 1:
                self.number += 1
                assert limit_seconds < 260, "what is left of the call, and a little more"
                return Ended(seconds=limit_seconds, failure="timeout", reason="stopped")
            return super().run(number, config, limit_seconds=limit_seconds)

    asked = ask(tmp_path, pause_after="4m")
    told: list[str] = []
    answer = run_ask(
        asked, tell=told.append, runner_of=lambda journal, of: Endless(of.space, 0, faults=0.0, wrong_losses=0.0)
    )
    assert answer.stopped == "pause" and len(answer.result.trials) == 1
    assert "begins anew in the next one" in told[-1]
