"""Checks of overrides in PyTorch that need two processes: `tests/torch/test_at_scale.py` runs them.

    python tests/helpers/parallel_checks.py REPORT RANK PORT [BEGINNING_OF_NAMES...]

Each trains a network over two processes under rules, and compares it with one process that has the
whole batch and no regrad: there the rules are Functions, written by hand in the network. REPORT
gets a JSON object with the name of each check that holds; the first that does not ends the process.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as split
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import regrad as rg
import regrad.torch
from regrad.errors import NotFiredError, PassedOverError
from tests.helpers import networks as nets
from tests.helpers.planned import trained_by_a_plan

override = regrad.torch.gradient_override_map

# -- comparing -------------------------------------------------------------------------------------


def mine(batch: nets.Batch) -> nets.Batch:
    """The half of a batch that this process has."""
    x, labels = batch
    return x.chunk(2)[dist.get_rank()], labels.chunk(2)[dist.get_rank()]


def assert_same_training(
    model: nn.Module,
    batch: nets.Batch,
    by_hand: nn.Module,
    whole_batch: nets.Batch,
    rules: Any = nets.BOTH,
) -> None:
    """Rules fire in each process; losses, gradients and weights are those of one process."""
    with override(rules) as used:
        losses, found = nets.train(model, batch)
    used.assert_fired(group=dist.group.WORLD)
    expected_losses, expected = nets.train(by_hand, whole_batch)
    nets.assert_equal(found, expected)
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    assert torch.allclose(mean / 2, torch.tensor(expected_losses, dtype=torch.float64), rtol=1e-9)


def check_data_parallel(wrap: Callable[[nn.Module], nn.Module], **options: Any) -> None:
    assert_same_training(
        wrap(nets.GPT(**options)), mine(nets.texts()), nets.gpt_by_hand(**options), nets.texts()
    )  # fmt: skip


# -- DistributedDataParallel -----------------------------------------------------------------------


def ddp_the_comparison_can_fail() -> None:
    models = (nets.ResNet(), nets.resnet_by_hand()), (nets.GPT(), nets.gpt_by_hand())
    for (model, by_hand), batch in zip(models, (nets.images(), nets.texts()), strict=True):
        assert nets.distance(nets.train(model, batch)[1], nets.train(by_hand, batch)[1]) > 1e-3


def ddp_with_options() -> None:
    small = {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}
    check_data_parallel(DistributedDataParallel)
    for options, checkpoints in [(small, True), *[({"static_graph": True}, c) for c in (0, 1)]]:
        wrap: Any = partial(DistributedDataParallel, **options)
        check_data_parallel(wrap, checkpoints=bool(checkpoints))


def ddp_unused_parameters() -> None:
    model = DistributedDataParallel(nets.ResNet(), find_unused_parameters=True)
    assert_same_training(
        model, mine(nets.images()), nets.resnet_by_hand(), nets.images(), nets.RELU
    )


def ddp_accumulated_gradients() -> None:
    model = DistributedDataParallel(nets.GPT())
    (x1, x2), (labels1, labels2) = (part.chunk(2) for part in mine(nets.texts()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with override(nets.BOTH) as used:
        for _ in range(2):
            optimizer.zero_grad()
            with model.no_sync():
                (nets.loss_of(model(x1), labels1) / 2).backward()
            (nets.loss_of(model(x2), labels2) / 2).backward()
            optimizer.step()
    assert [hit.ran for hit in used.hits] == [8, 8]  # blocks, parts, steps: each in one line
    by_hand, (x, labels) = nets.gpt_by_hand(), nets.texts()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        nets.loss_of(by_hand(x), labels).backward()
        optimizer.step()
    nets.assert_equal(nets.state(model), nets.state(by_hand))


def ddp_rules_of_regrad_and_second_order() -> None:
    rules = {"Relu": lambda dy, x: rg.where(x > 0, dy, 0.25 * dy)}

    def penalty(model: nn.Module, batch: nets.Batch) -> dict[str, Tensor]:
        x = batch[0].clone().requires_grad_()
        loss = nets.loss_of(model(x), batch[1]) * len(x)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        (dx.square().sum() / len(x)).backward()
        return nets.state(model)

    with override(rules) as used:
        model = DistributedDataParallel(nets.ResNet(), find_unused_parameters=True)
        found = penalty(model, mine(nets.images()))
    used.assert_fired(group=dist.group.WORLD)
    expected = penalty(nets.resnet_by_hand(), nets.images())
    names = [name for name in expected if "head.bias" not in name]  # (of no effect on dx)
    assert max((found[n] - expected[n]).abs().max().item() for n in names) < 1e-8


def ddp_communication_hooks() -> None:
    """What is communicated in float16 is equal to what a network by hand communicates so."""
    found = []
    for model, rules in ((nets.GPT(), nets.BOTH), (nets.gpt_by_hand(), {})):
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        with override(rules):
            found.append(nets.train(ddp, mine(nets.texts()))[1])
    nets.assert_equal(*found)
    assert (
        nets.distance(found[0], nets.train(nets.gpt_by_hand(), nets.texts())[1]) > 1e-8
    )  # (it did communicate so)


class Convolutions(nn.Sequential):
    def __init__(self, relu: Any = None) -> None:
        torch.manual_seed(0)
        act = relu or nn.ReLU
        super().__init__(
            nn.Conv2d(3, 8, 3), act(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), act(),
            nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip
        self.double()


class LeakyModule(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return nets.Leaky.apply(x)


def ddp_compiled() -> None:
    for wrap in (
        lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager"),
        lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager")),  # pyright: ignore
    ):
        torch.compiler.reset()
        model: Any = wrap(Convolutions())
        by_hand = Convolutions(LeakyModule)
        assert_same_training(model, mine(nets.images()), by_hand, nets.images(), nets.RELU)
        plain = wrap(Convolutions())  # without a scope, the same code has no rule in it
        nets.assert_equal(
            nets.train(plain, mine(nets.images()))[1], nets.train(Convolutions(), nets.images())[1]
        )


def ddp_a_plan_of_quantizers() -> None:
    found = trained_by_a_plan(nets.GPT(), mine(nets.texts()), DistributedDataParallel)
    nets.assert_equal(found, trained_by_a_plan(nets.GPT(), nets.texts()))


def fsdp_a_plan_of_quantizers() -> None:
    found = trained_by_a_plan(nets.GPT(), mine(nets.texts()), in_shards, mean=True)
    nets.assert_equal(found, trained_by_a_plan(nets.GPT(), nets.texts()))


def at_places(model: Any) -> list[dict[Any, Any]]:
    """Maps that name the first block of a ResNet, each in its own way."""
    keys = ["blocks.0"], [model.blocks[0]], [lambda site: "blocks.0" in site.path], ["**", 1]
    return [{rg.at(where, "Relu", *nth): nets.RELU["Relu"]} for where, *nth in keys]


def by_hand_at_places(whole_block: bool) -> nn.Module:
    """A ResNet whose first block has the rule in it: in both of its ReLUs, or in the first."""
    model: Any = nets.ResNet()
    del model.blocks[0].relu
    model.blocks[0].relu = nets.Leaky.apply if whole_block else FirstOnly()
    return model


class FirstOnly(nn.Module):  # a ReLU with the rule at every other call
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nets.Leaky.apply(x) if self.calls % 2 else F.relu(x)  # pyright: ignore


def check_places(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Rules in one place of a model, which is given as it is, or in its wrapper."""
    for i in range(4):
        for inside in (True, False):
            model = wrap(inner := nets.ResNet())
            with override(at_places(inner)[i], model=inner if inside else model) as used:
                _, found = nets.train(model, mine(nets.images()))
            used.assert_fired(group=dist.group.WORLD)
            nets.assert_equal(found, nets.train(by_hand_at_places(i != 3), nets.images())[1])


def ddp_rules_at_places() -> None:
    check_places(lambda model: DistributedDataParallel(model, find_unused_parameters=True))


# -- FSDP2 -----------------------------------------------------------------------------------------


def in_shards(model: Any, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp_rules_at_places() -> None:
    def wrap(model: Any) -> nn.Module:
        for block in (model.blocks[0], model.blocks[2]):
            fully_shard(block)
        return fully_shard(model)

    check_places(wrap)


def fsdp_activation_checkpoints_or_none() -> None:
    for checkpoints in (False, True):
        check_data_parallel(in_shards, checkpoints=checkpoints)


def fsdp_rules_that_keep_weights() -> None:
    """A rule that names a weight gets it, although its memory is given back in between."""

    def turned(dy: Tensor, a: Tensor, b: Tensor) -> Any:
        return 0.5 * dy @ b.mT, 2 * (a.mT @ dy).sum_to_size(b.shape) if a.ndim == b.ndim else None

    found = []
    for model, batch in (
        (in_shards(nets.GPT(checkpoints=True)), mine(nets.texts())),
        (nets.GPT(), nets.texts()),
    ):
        with override({"MatMul": turned}) as used:
            found.append(nets.train(model, batch)[1])
        used.assert_fired()
    nets.assert_equal(*found)


def fsdp_mixed_precision() -> None:
    """One process casts the weights, and takes the halves of the batch one by one."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    with override(nets.RELU) as used:
        _, found = nets.train(in_shards(nets.ResNet(), mp_policy=policy), mine(nets.images()))
    used.assert_fired(group=dist.group.WORLD)
    model, (x, labels) = nets.resnet_by_hand(), nets.images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for part, name in zip(x.chunk(2), labels.chunk(2), strict=True):
            cast = copy.deepcopy(model).bfloat16()
            cast.zero_grad()
            nets.loss_of(cast(part.bfloat16()), name).backward()
            for p, q in zip(model.parameters(), cast.parameters(), strict=True):
                if q.grad is not None:
                    p.grad = (0 if p.grad is None else p.grad) + q.grad.double() / 2
        optimizer.step()
    nets.assert_equal(found, nets.state(model))


def fsdp_saved_and_loaded() -> None:
    """`torch.distributed.checkpoint` in a scope saves what there is, and loads it."""
    import torch.distributed.checkpoint as saving

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    trained, fresh = in_shards(nets.GPT()), in_shards(nets.GPT())
    with override(nets.BOTH):
        nets.train(trained, mine(nets.texts()))
        saving.save({"model": trained.state_dict()}, checkpoint_id=folder[0])
        held = {"model": fresh.state_dict()}
        saving.load(held, checkpoint_id=folder[0])
        fresh.load_state_dict(held["model"])
    for a, b in zip(trained.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(nets.whole(a), nets.whole(b))


# -- tensor and sequence parallel ------------------------------------------------------------------


def over_two(model: Any, mesh: Any = None, sequence: bool = False) -> nn.Module:
    """Split heads and hidden units; with `sequence`, what is between the layers by positions."""
    mesh = mesh or init_device_mesh("cpu", (2,))
    columns, rows = split.ColwiseParallel(), split.RowwiseParallel()
    plan: dict[str, Any] = {f"attention.{name}": columns for name in ("wq", "wk", "wv")}
    plan |= {"mlp.w1": columns, "attention.wo": rows, "mlp.w2": rows}
    if sequence:
        positions = Shard(1)
        gather = split.PrepareModuleInput(
            input_layouts=(positions,), desired_input_layouts=(Replicate(),)
        )
        plan |= dict.fromkeys(
            ("attention.wo", "mlp.w2"), split.RowwiseParallel(output_layouts=positions)
        )
        plan |= {"norm1": split.SequenceParallel(), "norm2": split.SequenceParallel()}
        plan |= {"attention": gather, "mlp": gather}
        split.parallelize_module(model, mesh, {
            "embed": split.RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
            "norm": split.SequenceParallel(),
            "head": split.ColwiseParallel(input_layouts=positions, output_layouts=Replicate()),
        })  # fmt: skip
    for block in model.blocks:
        split.parallelize_module(block, mesh, plan)
    return model


def tensor_parallel() -> None:
    assert_same_training(over_two(nets.GPT()), nets.texts(), nets.gpt_by_hand(), nets.texts())


def tensor_sequence_parallel() -> None:
    assert_same_training(
        over_two(nets.GPT(), sequence=True), nets.texts(), nets.gpt_by_hand(), nets.texts()
    )


def tensor_parallel_in_shards() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = in_shards(over_two(nets.GPT(checkpoints=True), mesh["tensor"]), mesh=mesh["data"])
    assert_same_training(model, nets.texts(), nets.gpt_by_hand(), nets.texts())


class Perceptron(nn.Module):
    """What is between its layers may stay a DTensor."""

    def __init__(self, relu: Any = F.relu, mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.relu = nn.Linear(8, 16), nn.Linear(16, 5), relu
        self.mesh = mesh
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        given: Any = DTensor.from_local(x, self.mesh, [Replicate()]) if self.mesh else x
        y = self.last(self.relu(self.first(given)))
        return y.full_tensor() if self.mesh else y


def perceptron_of_dtensors() -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    return split.parallelize_module(Perceptron(mesh=mesh), mesh, {
        "first": split.ColwiseParallel(use_local_output=False),
        "last": split.RowwiseParallel(input_layouts=Shard(-1), use_local_output=False),
    })  # fmt: skip


def tensor_rules_get_dtensors() -> None:
    x, labels = nets.images()
    batch = x.flatten(1)[:, :8], labels
    of_regrad = {"Relu": lambda dy, x: rg.where(x > 0, dy, 0.25 * dy)}
    for rules in (nets.RELU, of_regrad):
        assert_same_training(
            perceptron_of_dtensors(), batch, Perceptron(nets.Leaky.apply), batch, rules
        )


def tensor_products_under_rules() -> None:
    """Products are taken apart of DTensors as of others."""

    def halved(dy: Tensor, a: Tensor, b: Tensor) -> Any:
        rows = (a.flatten(0, -2), dy.flatten(0, -2)) if b.ndim < a.ndim else (a, dy)
        return 0.5 * (dy @ b.mT), 2 * (rows[0].mT @ rows[1])

    for make in (over_two, lambda model: over_two(model, sequence=True)):
        found = []
        for model in (make(nets.GPT()), nets.GPT()):
            with override({"MatMul": halved}) as used:
                found.append(nets.train(model, nets.texts())[1])
            used.assert_fired()
        nets.assert_equal(*found)


def tensor_causal_attention_of_dtensors_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    dx = DTensor.from_local(x, mesh, [Shard(1)])
    try:
        F.scaled_dot_product_attention(dx, dx, dx)
    except NotImplementedError:  # PyTorch 2.10 has none for DTensors on a CPU
        return
    with override({"Softmax": nets.sharper}):
        F.scaled_dot_product_attention(dx, dx, dx).to_local().sum().backward()
        try:
            F.scaled_dot_product_attention(dx, dx, dx, is_causal=True)
        except PassedOverError as error:
            assert "DTensor" in str(error) and "use_local_output=True" in str(error), error
        else:
            raise AssertionError("the mask of a shard was not refused")


# -- pipelines -------------------------------------------------------------------------------------


class Stage(nn.Module):
    """The first or the second half of a GPT."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(rank): model.blocks[rank]})
        if rank == 0:
            self.embed = model.embed
        else:
            self.norm, self.head = model.norm, model.head
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[str(self.rank)](self.embed(x) if self.rank == 0 else x)
        return self.head(self.norm(y)) if self.rank else y


def in_stages() -> tuple[nn.Module, Any]:
    model, rank = Stage(nets.GPT(), dist.get_rank()), dist.get_rank()
    return model, pipelining.PipelineStage(model, rank, 2, torch.device("cpu"))


def traced_in_stages() -> tuple[nn.Module, Any]:
    split = {"blocks.1": pipelining.SplitPoint.BEGINNING}
    made = pipelining.pipeline(nets.GPT(), (nets.texts()[0][:2],), split_spec=split)
    stage = made.build_stage(dist.get_rank(), torch.device("cpu"))
    return stage.submod, stage


def check_pipeline(made: tuple[nn.Module, Any], schedule: Callable[[Any], Any]) -> None:
    (model, stage), (x, labels) = made, nets.texts()
    run = schedule(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with override(nets.BOTH) as used:
        for _ in range(3):
            optimizer.zero_grad()
            run.step(x) if dist.get_rank() == 0 else run.step(target=labels)
            optimizer.step()
    assert [hit.ran >= 12 for hit in used.hits] == [True] * 2, used.table()  # (4 in each step)
    expected, found = nets.train(nets.gpt_by_hand(), (x, labels))[1], nets.state(model)
    nets.assert_equal(found, {name: expected[name] for name in found})
    assert len(found) > 10


def pipeline_schedules() -> None:
    for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        check_pipeline(in_stages(), lambda stage, s=schedule: s(stage, 4, loss_fn=nets.loss_of))


def pipeline_with_split_backward_passes() -> None:
    check_pipeline(
        in_stages(),
        lambda stage: pipelining.ScheduleInterleavedZeroBubble([stage], 4, loss_fn=nets.loss_of),
    )


def pipeline_traced() -> None:
    check_pipeline(
        traced_in_stages(), lambda stage: pipelining.ScheduleGPipe(stage, 4, loss_fn=nets.loss_of)
    )


def pipeline_tracing_in_a_scope_is_refused() -> None:
    try:
        with override(nets.BOTH):
            traced_in_stages()
    except Exception as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        assert any(isinstance(each, PassedOverError) for each in causes), causes
        assert any("torch.export" in str(each) for each in causes), causes
    else:
        raise AssertionError("a program was written under a rule")


# -- hits ------------------------------------------------------------------------------------------


def hits_of_all_processes() -> None:
    x, rank = torch.ones(2, requires_grad=True), dist.get_rank()
    always = warnings.catch_warnings(record=True, action="always")
    with always as caught, override(nets.BOTH) as used:
        torch.relu(x).sum().backward()
        if rank == 1:
            torch.softmax(x, 0).sum().backward()
            torch.relu(x).sum().backward()
    assert len(caught) == 1 - rank  # the other process is not asked
    used.assert_fired("Relu", group=dist.group.WORLD)
    used.assert_fired(*(["Relu"] if rank == 0 else nets.BOTH))  # of this process alone
    try:
        used.assert_fired(group=dist.group.WORLD)
    except NotFiredError as error:  # the same in both
        assert str(error).startswith(
            "rank 0: the rule 'sharper' for the op type 'Softmax' never ran: no op of that "
            "type was created in the scope."
        ), error
    else:
        raise AssertionError("a rule ran in one process of two")
    table = used.gather()
    assert table.headings[:5] == ("rank", "op type", "rule", "calls", "rule ran")
    rows = [row[:5] for row in table.rows]
    assert rows == [("0", "Relu", "leaky", "1", "1"), *[("1", "Relu", "leaky", "1", "1")] * 2,
                    ("1", "Softmax", "sharper", "1", "1")], rows  # fmt: skip
    alone = dist.new_group([1])
    if rank == 1:
        used.assert_fired(group=alone)
        assert [row[0] for row in used.gather(alone).rows] == ["1"] * 3


# -- other processes, which prepare data -----------------------------------------------------------


class Images(Dataset[Any]):
    """Each example was made with a ReLU, and says whose gradient that has.

    (A worker that was forked cannot differentiate if its parent has: torch's own limit.)
    """

    def __getitem__(self, i: int) -> Any:
        x, labels = nets.images()
        y = torch.relu(x[i].clone().requires_grad_())
        return x[i], labels[i], type(y.grad_fn).__name__

    def __len__(self) -> int:
        return 8


def check_workers(method: str) -> None:
    """A worker that was forked in a scope has it; one that was started anew has none."""
    loader = DataLoader(Images(), 8, num_workers=1, multiprocessing_context=method)
    model, by_hand = nets.ResNet(), nets.resnet_by_hand()
    with override(nets.RELU) as used:
        ((x, labels, nodes),) = loader
        nets.loss_of(model(x), labels).backward()
    used.assert_fired()
    nets.loss_of(by_hand(nets.images()[0]), nets.images()[1]).backward()
    nets.assert_equal(nets.state(model), nets.state(by_hand))
    assert torch.equal(x, nets.images()[0])
    assert ({*nodes} == {"ReluBackward0"}) == (method != "fork"), nodes


def workers_of_each_method() -> None:
    for method in ("fork", "forkserver", "spawn"):
        check_workers(method)


# -- running ---------------------------------------------------------------------------------------

KINDS = ("ddp_", "fsdp_", "tensor_", "pipeline_", "hits_", "workers_")


def main(report: str, rank: str, port: str, *kinds: str) -> None:
    checks = {name: f for name, f in globals().items() if name.startswith(kinds or KINDS)}
    if not checks:
        sys.exit("no check of that name")
    warnings.simplefilter("error", rg.errors.UnusedOverrideWarning)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    for name, check in checks.items():
        print(name, flush=True)  # (shown if it fails)
        check()
        dist.barrier()
    Path(report).write_text(json.dumps(dict.fromkeys(checks)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
