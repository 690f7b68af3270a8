"""What a profile of a `fit` tells: two lines, a table, JSON, and the one thing to try."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep.training.profile_report import FitProfile

FOUND = FitProfile(
    wall=41.2,
    input=18.9,
    steps=12.4,
    callbacks=2.4,
    validation=1.2,
    checkpoint=0.7,
    compile=5.2,
    other=0.4,
    by_callback={"TensorBoard": 2.1, "CSVLogger": 0.3, "History": 0.0},
    step=0.012,
    taken=1000,
    steps_per_execution=1,
    data="PyDataset",
    workers=1,
    backend="jax",
)


def test_two_lines_tell_it():
    assert str(FOUND).splitlines() == [
        "of 41.2 s: waiting for data 18.9, steps 12.4, callbacks 2.4 (TensorBoard 2.1, CSVLogger "
        "0.3), validation 1.2, checkpoint 0.7, compiling 5.2",
        "Try workers=4 in the PyDataset: at best 22.3 s.",
    ]


def test_on_tpus_it_says_that_none_has_been_timed():
    assert "TPU" not in str(replace(FOUND, platform="gpu"))
    assert (
        str(replace(FOUND, platform="tpu"))
        .splitlines()[2]
        .startswith("Profile has not been tested")
    )


def test_what_is_nothing_is_left_out_and_what_is_other_is_told_above_two_percent():
    found = replace(FOUND, validation=0.0, checkpoint=0.01, callbacks=0.0, by_callback={})
    assert found.verdict == "of 41.2 s: waiting for data 18.9, steps 12.4, compiling 5.2"
    assert replace(found, other=4.3).verdict.endswith("compiling 5.2, other 4.3")
    short = replace(found, wall=9.0, ended_by="KeyboardInterrupt")
    assert short.verdict.startswith("of 9.00 s until KeyboardInterrupt: waiting for data 18.90, ")


def test_steps_that_draw_their_data_say_so():
    found = replace(FOUND, input=None, steps=31.3)
    assert found.verdict.startswith("of 41.2 s: steps with their data 31.3, callbacks 2.4")
    assert found.as_dict()["input"] is None


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"workers": 4}, "Try more than 4 workers of the PyDataset: at best 22.3 s."),
        (
            {"data": "arrays"},
            "Try a larger batch_size, or a tf.data pipeline with prefetch: at best 22.3 s.",
        ),
        ({"data": "generator"}, "Try a PyDataset with workers=4 instead of the generator: at best"),
        ({"data": "DataLoader", "workers": 0}, "Try num_workers=4 in the DataLoader: at best"),
        ({"data": "DataLoader", "workers": 2}, "Try more than 2 workers of the DataLoader: at"),
        ({"data": "tf.data"}, "Try map(..., num_parallel_calls=tf.data.AUTOTUNE) and prefetch("),
        ({"data": "other"}, "Try workers for the data, or a tf.data pipeline with prefetch: at"),
        (
            {"callbacks": 30.0, "by_callback": {"TensorBoard": 28.0, "CSVLogger": 2.0}},
            "Try to let TensorBoard save or log less often: at best 13.2 s.",
        ),
        (
            {"callbacks": 30.0, "by_callback": {"ProgbarLogger": 30.0}},
            "Try verbose=2, as the progress bar takes time: at best 12.4 s.",
        ),
        (
            {"validation": 20.0},
            "Try a larger validation_freq, or less validation data: at best 21.2 s.",
        ),
        ({"checkpoint": 20.0}, "Try to save less often, such as lockstep.Checkpoint(..., seconds="),
        ({"compile": 20.0}, "A longer fit does not compile again."),
        (
            {"steps": 20.0},
            "The steps take the longest: lockstep bench shows whether more devices help",
        ),
        (
            {"steps": 20.0, "step": 0.0004},
            "Try compile(steps_per_execution=10): a step takes only 0.4 ms, and Python starts "
            "each one.",
        ),
        (
            {"steps": 20.0, "step": 0.0004, "steps_per_execution": 20},
            "The steps take the longest: lockstep bench",
        ),
        (
            {"steps": 20.0, "step": 0.0004, "backend": "torch"},
            "The steps take the longest: lockstep",
        ),
    ],
)
def test_one_thing_to_try(changed, advice):
    found = replace(FOUND, **changed)
    assert found.advice.startswith(advice)
    assert len(found.advice) <= 100
    assert "\n" not in found.advice


def test_the_table_has_every_part():
    console = Console(record=True, width=100, force_jupyter=False)
    FOUND.show(console)
    shown = console.export_text()
    for text in (
        "waiting for data",
        "18.9",
        "46%",
        "  TensorBoard",
        "compiling",
        "at best 22.3 s.",
    ):
        assert text in shown
    assert "History" not in shown
    assert "waiting for data" in FOUND._repr_html_()


def test_json_has_the_numbers_and_the_lines():
    told = json.loads(FOUND.as_json())
    assert (told["wall"], told["by_callback"]["CSVLogger"]) == (41.2, 0.3)
    assert (told["verdict"], told["advice"]) == (FOUND.verdict, FOUND.advice)
