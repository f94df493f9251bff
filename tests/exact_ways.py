"""Ways to use torch in a loop over slices, in float32: with exact=True they have the same bytes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import elastix
from tests.trainables import Tied, Unused, accuracy, samples


def net():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 48),
        nn.LayerNorm(48),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(48, 10),
    )


def steps(ctx, **options):
    loader = ctx.loader(samples(70), batch_size=24, slices=8, **options)
    for epoch in loader.epochs(2):
        yield from epoch


def plain(ctx, model, optimizer=None, loss=F.cross_entropy, called=None):
    """The usual loop around a model."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for step in steps(ctx):
        for x, y in step:
            loss((called or model)(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled(ctx):
    model = net()
    plain(ctx, model, called=torch.compile(model, backend="aot_eager"))


def inductor(ctx):
    model = net()
    plain(ctx, model, called=torch.compile(model))


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


def autocast(ctx):
    plain(ctx, Autocast())


def half_parameters(ctx):
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain(ctx, model, optimizer, called=lambda x: model(x.bfloat16()).float())


def grad_scaler(ctx):
    """With overflows, which all leave out."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scaler = ctx.prepare(model, optimizer, scaler)
    for step in steps(ctx):
        overflows = ctx.step in (2, 4)
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * float("inf") if overflows else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class Twice(nn.Module):
    """A layer used in two checkpointed segments, with dropout in them."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1).requires_grad_(self.reentrant)
        for _ in range(2):
            x = checkpoint(self.segment, x, use_reentrant=self.reentrant)
        return self.head(x)

    def segment(self, x):
        return F.dropout(torch.tanh(self.first(x)), 0.1, self.training)


def checkpointing(ctx):
    plain(ctx, Twice(False))


def checkpointing_reentrant(ctx):
    plain(ctx, Twice(True))


def two_optimizers(ctx):
    """And two modules, gradients clipped and averaged weights tracked."""
    body, head = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh()), nn.Linear(32, 10)
    one = torch.optim.Adam(body.parameters(), lr=1e-2)
    other = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    ctx.prepare(body, head, one, other)
    average = torch.optim.swa_utils.AveragedModel(head)
    ctx.track(average=average)
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(head(body(x)), y).backward()
        nn.utils.clip_grad_norm_([*body.parameters(), *head.parameters()], 0.5)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(head)


def several_passes(ctx):
    """Two losses with a backward pass each, for every slice."""
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
            (0.1 * model(x + torch.randn_like(x)).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def around_each_slice(ctx):
    """Its two losses are one pass, at whose end gradients are there at once."""
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in steps(ctx):
        for x, y in step:
            with ctx.backward():
                F.cross_entropy(model(x), y).backward()
                (0.1 * model(x).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def gan(ctx):
    """A critic that has a pass of its own, then one for the generator in which it stands still."""
    maker = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1))
    critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    one = torch.optim.Adam(maker.parameters(), lr=1e-2)
    other = torch.optim.SGD(critic.parameters(), lr=0.1)
    ctx.prepare(maker, critic, one, other)
    for step in steps(ctx):
        for x, _ in step:
            made = maker(torch.randn(len(x), 16))
            (critic(made.detach()) - critic(x.flatten(1))).mean().backward()
            critic.requires_grad_(False)
            (-critic(made)).mean().backward()
            critic.requires_grad_(True)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()


def unused_parameters(ctx):
    plain(ctx, Unused())


def tied_weights(ctx):
    plain(ctx, Tied())


def weight_norm(ctx):
    model = nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(64, 10)))
    plain(ctx, model)


def sparse_embeddings(ctx):
    model = nn.Sequential(nn.EmbeddingBag(40, 16, sparse=True), nn.Linear(16, 10))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    plain(ctx, model, optimizer, called=lambda x: model((x.flatten(1) * 16).long()))


class Waves(nn.Module):
    """Complex parameters, one of which is used for some slices only, and one for none."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 16, dtype=torch.complex64)
        self.shift = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        self.never = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        hidden = self.first(x.flatten(1).to(torch.complex64))
        if bool((x[:, 0, 0, 0] > 1.5).any()):
            hidden = hidden * self.shift
        return self.head(hidden.abs())


def complex_parameters(ctx):
    plain(ctx, Waves())


def gradients_with_a_graph(ctx):
    """As optimizers want them that look at the curvature."""
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def gradients_kept(ctx):
    """zero_grad before the slices, and gradients that stay for a while."""
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = []
    for step in steps(ctx):
        optimizer.zero_grad(set_to_none=False)
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        kept = [*kept[-2:], [p.grad for p in model.parameters()]]
        with torch.no_grad():
            for gradients in kept[:-1]:
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = parameter.grad + 0.1 * gradient
        optimizer.step()


def gradients_of_slices_kept(ctx):
    """A slice's gradients stay as they are, and a hook may write the next slice's over its own."""
    model = net()
    scratch = {parameter: torch.empty_like(parameter) for parameter in model.parameters()}

    def clamp(parameter):
        with torch.no_grad():
            torch.clamp(parameter.grad, -0.01, 0.01, out=scratch[parameter])
        parameter.grad = scratch[parameter]

    for parameter in list(model.parameters())[::2]:
        parameter.register_post_accumulate_grad_hook(clamp)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = list(model.parameters())[1::2]
    for step in steps(ctx):
        kept = []
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
            kept.append([(p.grad, p.grad.clone()) for p in plain])
        assert all(torch.equal(*pair) for pairs in kept[:-1] for pair in pairs)
        optimizer.step()
        optimizer.zero_grad()


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("rounds", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return self.inner(x) / self.temperature


def buffers_changed_between_steps(ctx):
    """Before the slices and after them, and not by a forward pass."""
    model = Tempered()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = torch.ones(())
    for step in steps(ctx):
        model.temperature.mul_(0.9)
        model.rounds += 1
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.temperature.add_(0.01)
        expected = expected * 0.9 + 0.01
    assert torch.equal(model.temperature, expected)
    assert int(model.rounds) == ctx.step


def averaged_weights(ctx):
    """Of the last epochs, with the statistics of batch norm made anew for them at the end."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.GELU())
    model = nn.Sequential(model, nn.Dropout(0.1), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    average, flat = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, swa_lr=0.05)
    ctx.prepare(model, average, optimizer, scheduler, flat)
    for epoch in ctx.loader(samples(70), batch_size=24, slices=8).epochs(3):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch.number > 0:
            average.update_parameters(model)
            flat.step()
        else:
            scheduler.step()
    swa_utils.update_bn(DataLoader(samples(70), batch_size=24), average)


class ScheduleFree(torch.optim.Optimizer):
    """As such optimizers do, it keeps other weights in the model to evaluate than to train."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "steps": 0, "train_mode": False})

    @torch.no_grad()
    def turn(self, *, to_train):
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                for parameter in group["params"]:
                    fast = self.state[parameter].get("fast", parameter)
                    parameter.lerp_(fast, 0.1 if to_train else 1 - 1 / 0.9)
            group["train_mode"] = to_train

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["train_mode"]
            group["steps"] += 1
            part = 1 / group["steps"]
            for parameter in group["params"]:
                own = self.state[parameter]
                fast = own.setdefault("fast", parameter.clone())
                parameter.lerp_(fast, part)
                parameter.add_(parameter.grad, alpha=group["lr"] * (0.9 * (1 - part) - 1))
                fast.sub_(parameter.grad, alpha=group["lr"])


def schedule_free(ctx):
    """Weights change where an epoch begins and ends, and not if they have done so already."""
    model = net()
    model, optimizer = ctx.prepare(model, ScheduleFree(model.parameters()))
    for epoch in ctx.loader(samples(70), batch_size=24, slices=8).epochs(3):
        optimizer.turn(to_train=True)
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.turn(to_train=False)
        ctx.evaluate(accuracy, samples(20), batch_size=6)


def passing_buffers(ctx):
    """That are in no State: the loop moves one, and so does each forward pass another."""
    model = Tempered()
    model.register_buffer("temperature", torch.ones(()), persistent=False)
    model.inner[0].register_buffer("seen", torch.zeros(64), persistent=False)

    def called(x):
        flat = x.flatten(1)
        model.inner[0].seen += flat.mean(0)
        return model(x + 0.1 * model.inner[0].seen.view(1, 1, 8, 8))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(called(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.temperature.mul_(0.9)


class Observed(nn.Module):
    """It keeps the range of what it is given, in eval mode too, as for quantization."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest = torch.maximum(self.largest * 0.99, x.abs().max())
        return self.inner(x / self.largest)


def observed_in_evaluation(ctx):
    """Each worker evaluates other batches, and would observe those alone."""
    model = Observed()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.evaluate(accuracy, samples(20), batch_size=6)


def models_of_no_state(ctx):
    """An attack on each slice has an optimizer of its own, and so has a probe of the model."""
    model, probe = net(), nn.Linear(10, 10)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    probing = torch.optim.SGD(probe.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.DataLoader(samples(16), batch_size=16)
    for step in steps(ctx):
        for x, y in step:
            shift = torch.zeros_like(x, requires_grad=True)
            attack = torch.optim.Adam([shift], lr=0.01, maximize=True)
            for _ in range(2):
                shift.grad = torch.autograd.grad(F.cross_entropy(model(x + shift), y), shift)[0]
                attack.step()
            F.cross_entropy(model(x + shift.detach()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for x, y in data:
            probing.zero_grad()
            F.cross_entropy(probe(model(x).detach()), y).backward()
            probing.step()


def sharpness_aware(ctx):
    """SAM: the gradient of each slice is that beside the parameters, uphill."""
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    named = dict(model.named_parameters())
    for step in steps(ctx):
        for x, y in step:
            slope = torch.autograd.grad(F.cross_entropy(model(x), y), list(named.values()))
            uphill = 0.05 / torch.stack([part.norm() for part in slope]).norm()
            pairs = zip(named.items(), slope, strict=True)
            beside = {name: p + uphill * part for (name, p), part in pairs}
            F.cross_entropy(torch.func.functional_call(model, beside, (x,)), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def warmed_up(ctx):
    """A backward pass before the group is there, whose gradients nobody zeroes."""
    model = net()
    x, y = next(iter(torch.utils.data.DataLoader(samples(8), batch_size=8)))
    F.cross_entropy(model(x), y).backward()
    plain(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))


def moved_after_steps(ctx):
    """By the loop itself: a teacher that stands still for autograd, averages, momenta, a buffer."""
    model = Tempered()
    teacher = nn.Linear(10, 10).requires_grad_(False)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay, use_buffers=True)
    average.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.prepare(model, teacher, average, optimizer)
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(teacher(model(x)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.weight.data.mul_(0.99)
        average.update_parameters(model)
        for slot in optimizer.state.values():
            slot["momentum_buffer"].mul_(0.5)
        model.temperature.mul_(0.9)
        model.rounds += 1


def noise_before_slices(ctx):
    """Done again, such a step would begin with other parameters."""
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps(ctx):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def noise_past_the_counters(ctx):
    """The same, past the version counters of the parameters."""
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps(ctx):
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


WORK = {
    way.__name__: way
    for way in (
        autocast,
        half_parameters,
        grad_scaler,
        checkpointing,
        checkpointing_reentrant,
        two_optimizers,
        several_passes,
        around_each_slice,
        gan,
        unused_parameters,
        tied_weights,
        weight_norm,
        sparse_embeddings,
        complex_parameters,
        gradients_with_a_graph,
        gradients_kept,
        gradients_of_slices_kept,
        noise_before_slices,
        noise_past_the_counters,
        buffers_changed_between_steps,
        averaged_weights,
        schedule_free,
        passing_buffers,
        observed_in_evaluation,
        models_of_no_state,
        sharpness_aware,
        warmed_up,
        moved_after_steps,
        compiled,
        inductor,
    )
}
SELDOM = ("compiled", "inductor")  # tracing takes seconds


# ------------------------------------------------------------------------------------ refused


def no_slices(ctx):
    model = net()
    ctx.prepare(model)
    ctx.loader(samples(70), batch_size=24)


def no_power_of_two(ctx):
    ctx.prepare(net())
    ctx.loader(samples(70), batch_size=24, slices=6)


def per_worker(ctx):
    ctx.prepare(net())
    ctx.loader(samples(70), batch_size=24, slices=8, per_worker=True)


def rates_that_follow(ctx):
    model = net()
    _, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ctx.scale_rate(optimizer, reference=2)


def no_loader(ctx):
    model = net()
    ctx.prepare(model)
    model(torch.rand(4, 1, 8, 8)).sum().backward()


def between_steps(ctx):
    model = net()
    ctx.prepare(model)
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        model(torch.rand(4, 1, 8, 8)).sum().backward()


def lbfgs(ctx):
    """Its closure wants the gradient of the batch, and not of a slice, as often as it likes."""
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=2))
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()

        def closure():
            loss = F.cross_entropy(model(x), y)  # noqa: B023 - called at once
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()


def accumulated(ctx):
    model = net()
    ctx.prepare(model)
    for step in steps(ctx):
        for x, y in step:
            with ctx.accumulate():
                F.cross_entropy(model(x), y).backward()


def nondeterministic(ctx):
    model = net()

    def loss(output, y):
        output.detach().put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return F.cross_entropy(output, y)

    plain(ctx, model, loss=loss)


def changed_by_forward(ctx):
    """Rows that a slice uses are made shorter, in place, by whoever computes it."""
    model = nn.Sequential(nn.Embedding(40, 4, max_norm=1.0), nn.Flatten(), nn.Linear(256, 10))
    plain(ctx, model, called=lambda x: model((x.flatten(1) * 16).long()))


def other_threads(ctx):
    torch.set_num_threads(2 if ctx.worker == 1 else 1)
    ctx.prepare(net())


def zeroed_in_every_other_step(ctx):
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        if ctx.step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


def checkpointing_later(ctx):
    """That passes nest is seen when the first piece of a gradient has been added up."""
    model = Twice(False)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.reentrant = True


def sharpness_aware_in_place(ctx):
    """SAM as it is mostly written: the parameters themselves are moved uphill and back."""
    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        moved = [0.05 * parameter.grad for parameter in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moved)
        optimizer.zero_grad()
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moved)
        optimizer.step()


def hooked_late(ctx):
    """Gradients were taken when the hook puts others in their place."""

    def put_half(parameter):
        parameter.grad = parameter.grad * 0.5

    model = net()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(put_half)
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def scheduled_by_slices(ctx):
    """A worker has as many as fall to it, and computes some of them again."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
    for step in steps(ctx):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()


def forgotten_critic(ctx):
    """It is trained by each worker for itself, and the generator by all of them."""
    maker, critic = nn.Linear(16, 64), nn.Linear(64, 1)
    one = torch.optim.Adam(maker.parameters(), lr=1e-2)
    other = torch.optim.SGD(critic.parameters(), lr=0.1)
    ctx.prepare(maker, one)
    for step in steps(ctx):
        for x, _ in step:
            made = maker(torch.randn(len(x), 16))
            (critic(made.detach()) - critic(x.flatten(1))).mean().backward()
            (-critic(made)).mean().backward()
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()


REFUSED = {
    scheduled_by_slices: "optimizer, which was prepared or tracked, was changed",
    forgotten_critic: "whose parameters were not given to ctx.prepare",
    hooked_late: "a hook that was registered on them",
    checkpointing_later: "checkpoint from the first step on",
    zeroed_in_every_other_step: "begins with the gradients of the step before",
    other_threads: "worker 0: torch",
    no_slices: "exact=True) needs slices",
    no_power_of_two: "slices=4 or slices=8",
    per_worker: "per_worker=True",
    rates_that_follow: "ctx.scale_rate",
    no_loader: "outside of the slices",
    between_steps: "outside of the slices",
    lbfgs: "outside of the slices",
    sharpness_aware_in_place: "iterated a second time",
    accumulated: "ctx.accumulate",
    changed_by_forward: "parameter 0.weight was changed within the loop",
    nondeterministic: "put_: torch has no implementation",
}


class Way:
    """A train function that is pickled by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, ctx: elastix.Context) -> None:
        {**WORK, **{way.__name__: way for way in REFUSED}}[self.name](ctx)
