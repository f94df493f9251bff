"""What a member refuses, and warns of, in words: the fact, what was done, what to do next. Pure.

Not here: what checks look for, and what a step of slices refuses (exactness, step_checks,
sliced_step).
"""

from collections.abc import Sequence

from elastix.errors import ConfigError, TrainError

DOUBTFUL_STEP = (
    "a step drew no batch, and the batches of the step before it were split over the workers in "
    "different ratios: its gradients are weighed like those of the last of them. If it is about "
    "another one, draw them all before the first backward pass: then they are all split alike."
)

MISSED_PASSES = (
    "lost in a further backward pass on a batch: worker %s. From step %d on, the passes on this "
    "batch are about the samples of the workers that are left. The first pass had the others, so "
    "they count as used and are not drawn again."
)

UNMARKED_STEP = (
    "step %d is void, and nothing says where it began: no optimizer has moved, but what the loop "
    "changes beside that (schedulers, averages of weights) stays changed. Call ctx.boundary() "
    "before each batch, or draw batches from ctx.loader, and it is put back."
)

GRADIENTS_DROPPED = (
    "ctx.prepare was given parameters that had gradients, of a backward pass before it. They were "
    "dropped: a worker that joins, and a run that is continued, would add them to a later step. "
    "Call optimizer.zero_grad() before ctx.prepare, and nothing is dropped."
)

UNSYNCED_NORM = (
    "the model has SyncBatchNorm, and workers do not wait for each other in a forward pass: each "
    "normalises by its own samples of the batch, as BatchNorm does, and their number changes with "
    "the group. The run goes on. Use GroupNorm or LayerNorm, or a loader with slices, which have "
    "the same samples however many workers there are."
)

PLAIN_LOADER = (
    "steps are made on batches of a torch DataLoader: each worker has all of them, so in an "
    "epoch the group trains on every sample as often as there are workers (now: %d). Nobody "
    "counts them, and a worker that joins and a run that is continued begin at its beginning. The "
    "run goes on. To share each epoch write `for epoch in ctx.loader(dataset, "
    "batch_size).epochs(n):` and `for batch in epoch:`, where batch_size is that of the whole "
    "group. If each worker has data of its own, nothing is wrong."
)

NO_BOUNDARY = (
    "%d steps were taken, and nothing says where a step begins: the train function draws no batch "
    "from ctx.loader, and does not call ctx.boundary(). So no State is stored before the end, no "
    "worker can join, and nobody waits for the smallest number of workers. The run goes on. Call "
    "ctx.boundary() before each step, or draw the batches from ctx.loader."
)

SAME_SAMPLES = (
    "loaders %d and %d have drawn the same samples of one dataset for step %d, since both have the "
    "same seed. The run goes on. If each sample is to be paired with another one, as mixup does, "
    "give one loader another seed: ctx.loader(..., seed=1). If they are meant to be the same, "
    "nothing is wrong."
)

OTHER_TURN = (
    "the run goes on after step %d, where it would have been the turn of loader %d by the order in "
    "which loaders were drawn before, and loader %d was drawn. If the train function goes by a "
    "counter of its own, which begins anew, the result is not that of a run without a stop: go by "
    "ctx.step. If it is meant to change here, nothing is wrong."
)


CAME_TO_NONE = (
    "This worker began where an epoch had no batch left: it joined there, or the run goes on from "
    "a State that was captured there. So the loop over the epoch was not run, and what it sets is "
    "not there. Set it before that loop too, or use it within."
)

RELATIVE_PATH = (
    "If {path!r} is a file: this worker runs in the folder {folder} on {host}. Give the file's "
    "absolute path there."
)

LEFT_OVER = (
    "the train function came to its end after step %d, and what it has added up within "
    "ctx.accumulate() since is in no step: the samples of these batches were not used. Run the "
    "last backward pass of an epoch outside of ctx.accumulate(), as with `len(epoch) == 0`."
)


def prepared_twice() -> ConfigError:
    """ctx.prepare was called before."""
    return ConfigError(
        "ctx.prepare was called twice. The second call did nothing; the run ends. Give it all at "
        "once: model, optimizer = ctx.prepare(model, optimizer)."
    )


def trained_before(name: str) -> ConfigError:
    """A model that is not built in the train function is trained by a further run."""
    return ConfigError(
        f"{name} is as an earlier trial of this process has left it, and this trial was to train "
        "it: the model, or the tensors that it was made of, were built outside of the train "
        "function, so all trials of a worker share them. The trial ends. Build them in the "
        "function, or train a copy: copy.deepcopy(model), tensor.clone()."
    )


def used_before(kind: str) -> ConfigError:
    """An optimizer, or another object with a state, goes on where an earlier run has stopped."""
    return ConfigError(
        f"ctx.prepare or ctx.track got an object ({kind}) whose state is as an earlier trial of "
        "this process has left it: it was made outside of the train function, so all trials of a "
        "worker share it. The trial ends. Make it in the function."
    )


def never_prepared() -> ConfigError:
    """A train function of a group came to its end, and its worker had never joined the group."""
    return ConfigError(
        "the train function came to its end without ctx.prepare, so the workers never formed a "
        "group: each did the same by itself. Nothing of it is stored. Give ctx.prepare the model "
        "and the optimizer, and draw the batches from ctx.loader. (With an adapter the group "
        "forms at the first batch.)"
    )


def passes_rungs(reports: int) -> ConfigError:
    """A trial was to pause, and steps were taken since with no boundary between them."""
    return ConfigError(
        f"this trial was to pause after {reports} reports, and went on: nothing says where its "
        "steps end, so rungs cannot stop it. The trial was ended. Draw the batches from "
        "ctx.loader, or call ctx.boundary() after each optimizer.step()."
    )


def never_took_a_step() -> ConfigError:
    """All that a train function has computed was added up, and is in no step."""
    return ConfigError(
        "the train function never took a step: all its backward passes ran within "
        "ctx.accumulate(), which only adds up the gradients of each worker by itself. Nothing of "
        "it is stored. Run the last backward pass of each step outside of it; in a pipeline, use "
        "`with ctx.backward():` alone."
    )


def never_ran_backward() -> ConfigError:
    """Batches were drawn, and no gradient of a prepared parameter was computed."""
    return ConfigError(
        "the train function drew batches and never took a step: no backward pass has reached a "
        "parameter of the modules that ctx.prepare was given. Nothing of it is stored. Train those "
        "modules: a copy that is made of one later is another model, with an optimizer of its own."
    )


def not_averaged() -> ConfigError:
    """An optimizer would use what this worker has computed alone."""
    return ConfigError(
        "optimizer.step() was called with gradients of this worker's samples alone: a batch was "
        "drawn, and no backward pass outside of ctx.accumulate() has averaged them over the "
        "workers. They may come from torch.autograd.grad or torch.func, or a hook on a gradient "
        "took the step before backward had ended. It was not taken; the run ends. Put gradients "
        "into param.grad within `with ctx.backward():`, at whose end they are averaged, and call "
        "optimizer.step() after it."
    )


def other_thread() -> ConfigError:
    """A thread of the user's draws batches ahead."""
    return ConfigError(
        "a loader was asked for a batch in another thread than ctx.prepare was called in, so "
        "nobody could say which batches a backward pass is about. Nothing was drawn; the run ends. "
        "Draw batches in the thread that trains; to load ahead give "
        "ctx.loader(..., num_workers=2)."
    )


def never_took_an_inner_step() -> ConfigError:
    """Each batch was one of several that make an inner step, to the end."""
    return ConfigError(
        "no batch made an inner step of ExchangeConfig(every_steps=...): after each of them a pass "
        "ran within ctx.accumulate(), which says that the next batch belongs to the same step. So "
        "no outer step was due, and the workers never exchanged anything. Nothing of it is stored. "
        "Use ctx.accumulate() for all batches of a step but the last. Several passes on one batch "
        "need none: here backward() only adds to the gradients of its own worker."
    )


def inherits_late() -> ConfigError:
    """ctx.prepare was called before ctx.inherit."""
    return ConfigError(
        "ctx.inherit was called after ctx.prepare, so workers that join later would not "
        "have what it copied. Nothing was copied. Call it first."
    )


def second_pass() -> ConfigError:
    """A step cannot be done again from its batch if it has drawn none."""
    return ConfigError(
        'FailureConfig(recovery="rollback") does a step again from its batch, and this is '
        "a second backward pass on one batch. The step was not taken; the run ends. Use "
        'recovery="forward" for loops of this kind, or draw a batch for each step.'
    )


def small_batch(samples: int, workers: int, unit: int = 1) -> ConfigError:
    """A global batch has fewer samples than the group has workers, or fewer micro-batches."""
    each = f"in micro-batches of {unit} samples for a worker " if unit > 1 else ""
    return ConfigError(
        f"a global batch of {samples} cannot be split {each}over {workers} "
        "workers. No loader was made. batch_size is that of the whole group; raise it, or "
        "use fewer workers."
    )


def carries_gradients() -> ConfigError:
    """A step adds to gradients of the step before, which an optimizer will use."""
    return ConfigError(
        "a step begins with the gradients of the step before: a batch was drawn, and they were not "
        "zeroed. A run that is continued from there, and a worker that joins, would not "
        "have them. The step was not taken; the run ends. Call optimizer.zero_grad() in "
        "each step. To add up the gradients of several batches run the backward passes of all "
        "but the last within ctx.accumulate() (fabric.no_backward_sync, accelerator.accumulate); "
        "with slices, use a larger batch_size and more slices."
    )


def not_with_inner_steps(call: str, instead: str) -> ConfigError:
    """It has no meaning where each worker takes steps by itself."""
    return ConfigError(
        f"{call} does not work with ExchangeConfig(every_steps=...): each worker takes steps by "
        f"itself, on its own share of each batch. Nothing was done; the run ends. Use {instead}."
    )


def steps_between_outer_steps() -> ConfigError:
    """A worker would part from the others before it goes its own way."""
    return ConfigError(
        "optimizer.step() was called with gradients and no batch in hand: none was drawn from a "
        "loader of ctx.loader yet, or the outer step of ExchangeConfig(every_steps=...) was taken "
        "since, as with ctx.evaluate, the end of an epoch, and the end of any loader's last epoch. "
        "Workers would part there. The step was not taken; the run ends. Draw batches from "
        "ctx.loader, and take steps within the loop over the epoch; call ctx.evaluate at the end "
        "of its body, after optimizer.step(). Give a second loader no fewer epochs than it is "
        "drawn from."
    )


def not_in_crew(call: str) -> ConfigError:
    """It is not built for workers of several processes."""
    return ConfigError(
        f"{call} does not work with ScalingConfig(crew=...) yet: each worker is several processes. "
        "Nothing was done; the run ends. Leave it out, or use workers of one process."
    )


def needs_microbatch() -> ConfigError:
    """A process may get a number of samples that is no whole number of micro-batches."""
    return ConfigError(
        "ctx.loader was given no microbatch, and crew has an axis 'pipe': the samples of a process "
        "may be no whole number of micro-batches, and a mean over unequal ones is not that over "
        "the batch. No loader was made; the run ends. Write ctx.loader(..., microbatch=4) with the "
        "samples of one, and make a schedule of len(x) // 4 of them, at least 1."
    )


def evaluation_needs_microbatch() -> ConfigError:
    """A schedule would be given a number of samples that is no whole number of micro-batches."""
    return ConfigError(
        "ctx.evaluate was given no microbatch, and crew has an axis 'pipe': its batches may be no "
        "whole number of micro-batches. Nothing was evaluated; the run ends. Write "
        "ctx.evaluate(..., microbatch=4) with the samples of one, and run schedule.eval in the "
        "metric, of a schedule of len(x) // 4 of them, at least 1."
    )


def odd_batches(batch_size: int, microbatch: int, parts: int) -> ConfigError:
    """Batches of an evaluation cannot be cut into micro-batches."""
    unit = microbatch * parts
    of_all = f" for each of {parts} places of the axis 'shard'" if parts > 1 else ""
    return ConfigError(
        f"ctx.evaluate: a batch_size of {batch_size} is no whole number of micro-batches of "
        f"{microbatch}{of_all}. Nothing was evaluated; the run ends. Make it a multiple of {unit}, "
        f"{max(unit, batch_size // unit * unit)} say, or use another microbatch."
    )


def no_schedule_ran() -> ConfigError:
    """A metric has called a stage by itself."""
    return ConfigError(
        "the metric of ctx.evaluate ran no schedule on a batch, and crew has an axis 'pipe': a "
        "stage that is called by itself is given the batch in place of what the stage before it "
        "makes of it. Nothing was computed; the run ends. Run schedule.eval(x) at all stages: it "
        "returns the outputs at the last one, where the metric returns its numbers, and None at "
        "others."
    )


def step_not_taken_together(call: str) -> ConfigError:
    """It is about to use gradients of this worker's own samples."""
    return ConfigError(
        f"{call} was called and a batch was drawn, but no step was taken on it within "
        "ctx.backward(): gradients are those of this worker's samples alone. The step was not "
        "taken; the run ends. Write: with ctx.backward(): schedule.step(...), for each batch."
    )


def clipped_otherwise(call: str, what: str, given: Sequence[float]) -> ConfigError:
    """The places of a worker would scale their parts of the model by different factors."""
    other = next(place for place, one in enumerate(given) if one != given[0])
    return ConfigError(
        f"{call} was given a {what} of {given[0]} at place 0 and of {given[other]} at place "
        f"{other} of a worker, which hold parts of one model: each would be scaled by a factor of "
        "its own. Nothing was clipped; the run ends. Give it the same at all places. "
        "ctx.clip_grad_norm_(model.parameters(), 1.0) goes by the norm of the whole model."
    )


def stages_parted(what: str) -> ConfigError:
    """What the places of a pipeline have prepared does not make up one State."""
    return ConfigError(
        f"the places of the axis 'pipe' have prepared {what}. Nothing was prepared. Give "
        "ctx.prepare the same kinds of objects at each stage, and each optimizer the same groups "
        "with the same options; a group may be empty."
    )


def not_by_stages(name: str) -> ConfigError:
    """An object looks at all parameters at once."""
    return ConfigError(
        f"{name} goes by the gradients of all parameters together, and with the axis 'pipe' a "
        "process has those of its stage. Nothing was prepared. Use AdamW or SGD, in float32 or "
        "bfloat16, or another mesh."
    )


def parted_in_evaluation(what: str) -> ConfigError:
    """The processes of one worker evaluate different things."""
    return ConfigError(
        f"ctx.evaluate was given {what} at one place of a worker than at another. Nothing was "
        "computed; the run ends. All places must give it the same dataset, batch_size and metric: "
        "elastix splits the batches over them. Names must depend neither on the batch nor on the "
        "place."
    )


def parted_in_mean() -> ConfigError:
    """The processes of one worker average different things."""
    return ConfigError(
        "ctx.mean was given other names at one place of a worker than at another, so numbers that "
        "do not belong together would have been added up. Nothing was computed; the run ends. All "
        "places must give it the same names; in a pipeline any number will do where the loss is "
        "not known."
    )


def parted_loaders() -> ConfigError:
    """The processes of one worker draw from different datasets, or in different ways."""
    return ConfigError(
        "ctx.loader was given a dataset of another length, another batch_size, slices, shuffle or "
        "seed at one place of a worker than at another, so they would draw different samples. No "
        "loader was made; the run ends. All places must give it the same: elastix splits each "
        "batch over them."
    )


def held_back_in_crew() -> ConfigError:
    """FSDP2 has kept gradients of a slice to itself."""
    return ConfigError(
        "FSDP2 was told not to reduce the gradients of a slice "
        "(set_requires_gradient_sync(False)), so they would be added to the next one's, and "
        "weighed like these; or a backward pass was left by an exception that was caught, before "
        "they were reduced. The step was not taken; the run ends. Leave it out: elastix adds up "
        "the slices of a batch itself. Let exceptions through."
    )


def ratios_in_crew() -> ConfigError:
    """Batches of one step would be split in several ratios, over workers or over their places."""
    return ConfigError(
        "batches that are split in different ratios were drawn for one step, which does not work "
        "with ScalingConfig(crew=...) yet. Nothing was done with the second; the run ends. Draw "
        "from one loader in a step, or make batches and datasets of both loaders equally large."
    )


def would_change_twice(name: str, step: int) -> TrainError:
    """An object was changed in a step that does not count, and cannot be put back."""
    return TrainError(
        f"step {step} has to be done again, and {name}, which is part of the State, was changed "
        "between its first batch and the end of its last backward pass. It is too large for a copy "
        "in every step, so it cannot be put back, and would be changed twice. The step does not "
        "count, and the run was stopped. Calling fit() again goes on from the last stored State. "
        "Change it after that backward pass, where optimizer.step() is."
    )
