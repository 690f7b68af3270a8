"""How many steps go into one program: found out on the steps themselves."""

import pytest

from lockstep.engines.jax.steps.pace import MOST_STEPS, WINDOW, Pace


class Machine:
    """Steps that take as long as they are said to, by its own clock."""

    def __init__(self, call, step, step_together):
        self.call, self.step, self.step_together = call, step, step_together
        self.now = 0.0
        self.pace = Pace(lambda: self.now)
        self.ran = []

    def epoch(self, steps, known=True):
        self.pace.begin_epoch(steps if known else None, lambda: None)
        left = steps
        while left:
            times = self.pace.next(left if known else None)
            run = min(times, left)
            self.ran.append(times)
            self.now += self.call + run * (self.step if times == 1 else self.step_together)
            left -= run
        return self


def test_small_steps_go_together():
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4).epoch(5000)
    assert machine.pace.times == MOST_STEPS
    assert machine.ran.count(MOST_STEPS) > 50  # what was found out is what runs


def test_steps_that_are_slower_in_a_loop_stay_single():
    machine = Machine(call=1e-4, step=5e-4, step_together=30e-4).epoch(3000)
    assert machine.pace.times == 1
    assert machine.ran[-1000:] == [1] * 1000


def test_long_steps_stay_single_without_a_trial():
    machine = Machine(call=1e-4, step=WINDOW, step_together=0).epoch(30)
    assert machine.pace.times == 1
    assert machine.ran == [1] * 30


def test_no_more_than_may_stand_on_the_devices():
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4)
    machine.pace.at_most(7)
    assert machine.epoch(3000).pace.times == 7
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4)
    machine.pace.at_most(1)
    assert set(machine.epoch(300).ran) == {1}


def test_few_steps_in_an_epoch_are_tried_over_several():
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4)
    for _ in range(60):
        machine.epoch(11)
    assert machine.pace.times == 5
    assert machine.ran[-3:] == [5, 5, 1]
    assert max(machine.ran) == 5


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_too_few_steps_to_tell(steps):
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4)
    for _ in range(10):
        machine.epoch(steps)
    assert set(machine.ran) == {1}
    assert machine.pace.times == 1


@pytest.mark.parametrize(("short", "times"), [(3, 1), (11, 5), (131, 43)])
def test_a_longer_epoch_is_tried_anew_where_the_length_was_what_bounded_it(short, times):
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4)
    for _ in range(60):
        machine.epoch(short)
    assert machine.pace.times == times
    machine.epoch(2 * short).epoch(5000)
    assert machine.pace.times == MOST_STEPS
    tried = len(machine.ran)
    machine.epoch(20_000)
    assert set(machine.ran[tried:-40]) == {MOST_STEPS}


def test_what_no_epoch_bounded_is_not_tried_anew():
    machine = Machine(call=1e-4, step=5e-4, step_together=30e-4).epoch(100).epoch(3000)
    assert machine.ran.count(max(machine.ran)) <= 10
    assert machine.pace.times == 1


def test_large_batches_bound_no_later_trial():
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4)
    machine.pace.at_most(1)
    machine.epoch(3)
    assert machine.epoch(5000).pace.times == MOST_STEPS


def test_no_long_rest_at_the_end_of_an_epoch():
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4)
    for _ in range(15):
        machine.epoch(101)
    assert machine.pace.times == 50
    assert machine.ran[-3:] == [50, 50, 1]


def test_epochs_of_unknown_length():
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4)
    for _ in range(60):
        machine.epoch(500, known=False)
    assert machine.pace.times == MOST_STEPS


def test_a_turn_that_the_end_of_an_epoch_cuts_off_is_void():
    """What lies between two epochs would count as steps."""
    machine = Machine(call=1e-4, step=1e-4, step_together=1e-4)
    for _ in range(200):
        machine.epoch(20, known=False)
        machine.now += 1000.0
    assert machine.pace.times in (None, 1)
