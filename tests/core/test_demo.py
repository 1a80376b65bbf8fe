"""The demo's sizes and words. `tests/cpu/test_commands.py` runs it."""

from kvdepot.lab.demo import compare, note_on_load, plan_demo

GIB = 1 << 30
MIB = 1 << 20


def test_the_demo_leaves_room_for_the_index_in_dev_shm() -> None:
    assert plan_demo(24 * GIB, 24 * GIB).pool_bytes == 512 * MIB
    assert 64 * MIB <= plan_demo(24 * GIB, 200 * MIB).pool_bytes < 192 * MIB
    assert plan_demo(GIB, 24 * GIB).pool_bytes == 128 * MIB


def test_a_dev_shm_that_holds_no_pool_does_not_bound_the_demo() -> None:
    assert plan_demo(24 * GIB, 64 * MIB).pool_bytes == 512 * MIB


def test_the_demo_names_a_busy_machine() -> None:
    assert note_on_load(0.9, 2) == ""
    assert "busy, with a load of 8.0 on 2 cores" in note_on_load(8.0, 2)


def test_the_demo_says_more_where_a_depot_costs_time() -> None:
    assert compare(3.0, 1.5).split() == ["2.0", "times", "less"]
    assert compare(3.0, 3.0).split() == ["1.0", "times", "less"]
    assert compare(7.5, 9.0).split() == ["1.2", "times", "more"]
