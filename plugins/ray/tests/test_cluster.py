"""Silos that are spread over a Ray cluster end in the bits of one process, also when a machine is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from silotune_ray import ray_pool

from silotune.core.workers import Workers
from silotune.errors import Diverged, InputError, SilotuneError
from silotune.lab.sweep import sweep
from tests.properties.test_workers import assert_the_same

SOME = ("local", "fedavg", "moon", "fedmcp", "fedfame", "feddpa-t, dropout")
SOME += ("rolora", "fedalt", "fdlora", "flora, ranks", "flexlora, ranks")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two machines of two cores, as processes of this one; the first has the cluster's head."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    started.add_node(num_cpus=2)
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture
def spread(cluster: Any) -> Workers:
    return Workers(cluster=cluster.address)


@pytest.mark.parametrize("case", SOME)
def test_a_cluster_gives_the_bits_of_one_process(federate, reference, spread, case, tmp_path):
    result = federate.run(case, tmp_path / "run", workers=spread)
    assert (result.summary["engine"], result.summary["workers"]) == ("ray", 3)
    assert_the_same(result, reference(case)[0])


def test_a_cluster_that_is_too_small_or_is_none(cluster):
    for workers, address, threads, refusal in (
        (9, cluster.address, 1, r"--workers 9: the cluster has cores for 3 of threads=1; allowed: 1 to 3"),
        (0, cluster.address, 64, r"--workers 1: the cluster has cores for 0 of threads=64; allowed: fewer threads"),
        (1, "nowhere", 1, r"--address nowhere: no cluster there"),
    ):
        with pytest.raises(InputError, match=refusal), ray_pool(workers, address, threads):
            pass


def test_a_machine_that_is_lost_in_a_round_has_its_work_done_again(federate, reference, cluster, spread, tmp_path):
    lost = cluster.add_node(num_cpus=2)

    def lose(number: int, what: str, done: int, total: int) -> None:
        if number == 2 and done == 0 and lost.all_processes:
            threading.Thread(target=cluster.remove_node, args=(lost, False)).start()

    result = federate.run("fedmcp", tmp_path / "run", workers=spread, progress=lose)
    assert result.summary["workers"] == 5
    assert_the_same(result, reference("fedmcp")[0])


def test_errors_are_those_of_one_process(federate, spread, tmp_path):
    with pytest.raises(Diverged, match=r"^silo '\w+', round \d[^\n]*$"):
        federate.run("fedavg", tmp_path / "diverged", "train.lr=1e30", workers=spread)


def test_work_that_ends_its_workers_is_given_up_and_the_pool_goes_on(cluster):
    with ray_pool(3, cluster.address, 1) as pool:
        with pytest.raises(SilotuneError, match=r"work was lost on the cluster \(\w+: .*; run again with --resume"):
            pool.submit(os._exit, 1).result(timeout=120)
        assert pool.submit(abs, -3).result(timeout=60) == 3


def test_work_that_cannot_be_sent_is_refused_and_the_pool_goes_on(cluster):
    with ray_pool(2, cluster.address, 1) as pool:
        with pytest.raises(TypeError, match="lock"):
            pool.submit(print, threading.Lock()).result(timeout=60)
        assert pool.submit(abs, -3).result(timeout=60) == 3


def test_trials_of_a_sweep_are_spread(federate, spread, tmp_path, tiny_config):
    words = [word for word in federate.words("fedavg") if not word.startswith("method=")]
    search = {"train.lr": [1e-3 * number for number in range(1, 7)]}
    tables = []
    for name, workers in (("spread", spread), ("whole", Workers(1))):
        out = tmp_path / name
        sweep("demo", *words, "rounds=1", methods=["fedavg"], seeds=[1], search=search, out=out, workers=workers)
        tables.append((out / "sweep.csv").read_text())
    assert tables[0] == tables[1]
