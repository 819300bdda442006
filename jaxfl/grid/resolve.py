"""What is asked for becomes methods and a setup: once, whatever language it is written in."""

from collections.abc import Sequence

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.asked import Asked, require_known
from jaxfl.config.options import declared
from jaxfl.config.setup import PartitionOptions, Setup, is_saved
from jaxfl.core.protocol import Method
from jaxfl.core.schedule import factors
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError
from jaxfl.folder.variant import Variant, choose
from jaxfl.mechanisms.wire import chosen_of
from jaxfl.results.measures import check_columns
from jaxfl.runs.prepare import chosen_partitioner


def resolve_run(choice: str | Method, asked: Asked) -> tuple[Variant, Setup]:
    """Return the method and the setup of a run.

    Raises:
      JaxflError: if there is no such method or option, one has another type or is out of range, or options
        contradict each other.
    """
    method, _ = registry.method(choice)
    require_known(method.name, declared(Setup) | declared(method.config), asked)
    shared = {name: asked[name] for name in asked if name in declared(Setup)}
    variant = choose(choice, **{name: asked[name] for name in asked if name not in shared})
    return variant, setup_of(shared)


def resolve(whose: str, methods: Sequence[str | Method], asked: Asked) -> tuple[list[Variant], Setup]:
    """Return the methods and the setup of several runs.

    An option of the federation or of every method applies to all of them that do not choose it themselves.
    Any other option applies to the methods that have it, of which there must be at least one.

    Raises:
      JaxflError: as `resolve_run`.
    """
    having = [declared(registry.method(choice)[0].config) for choice in methods]
    known = declared(Setup) | declared(Training)
    own = {name: asked[name] for name in asked if name not in known}
    for options in having:
        known |= options
    for name in own:
        if name not in known and (owners := registry.owners(name)):
            raise JaxflError(f"{whose}: {name} is an option of {', '.join(owners)}, of which none is named.")
    require_known(whose, known, asked)
    common = {name: asked[name] for name in asked if name in declared(Training)}
    variants = [
        choose(choice, common, {name: own[name] for name in own if name in options})
        for choice, options in zip(methods, having, strict=True)
    ]
    return variants, setup_of({name: asked[name] for name in asked if name in declared(Setup)})


def setup_of(asked: Asked) -> Setup:
    """Return the setup of the options that are asked for, which fit each other."""
    setup = Setup.of(**asked)
    check_setup(setup)
    return setup


def check_setup(setup: Setup) -> None:
    """Refuse options that contradict each other."""
    check_columns(setup.machine.show)
    public, options = choices.split(setup.data.public)
    if public in ("auto", "none") and options:
        option = next(iter(options))
        raise JaxflError(f"--public {public} takes no {option}; write --public held-out,share=0.1.")
    if setup.run.stop_at_target and not setup.run.target:
        raise JaxflError("--stop-at-target needs an accuracy to stop at; add --target 0.7.")
    if setup.run.deadline is not None and not setup.run.device_profile:
        raise JaxflError(
            f"--deadline {setup.run.deadline:g} needs to know how fast clients are; add --device-profile "
            "ARCHITECTURE=FLOPS:BYTES for each architecture."
        )
    if setup.run.device_spread and not setup.run.device_profile:
        raise JaxflError(
            f"--device-spread {setup.run.device_spread:g} is around the speeds of --device-profile; add "
            "--device-profile ARCHITECTURE=FLOPS:BYTES for each architecture."
        )
    every = setup.machine.checkpoint_every
    if every is not None and every % setup.run.eval_every:
        raise JaxflError(
            f"--checkpoint-every {every} is not a multiple of --eval-every {setup.run.eval_every}; "
            "checkpoints are written at evaluations."
        )
    if is_saved(setup.partition.partition):
        _check_saved(setup)
    else:
        chosen_partitioner(setup)
    chosen_of(setup)
    factors(setup.run.schedule, setup.run.rounds)  # or a sentence about the schedule


def seed_draws(setup: Setup) -> bool:
    """Return whether the partition seed draws anything with a saved partition."""
    others = setup.data.public not in ("auto", "none", "held-out")
    links = setup.run.topology.partition(",")[0] == "er" or ".py:" in setup.run.topology
    clients = setup.run.newcomers or setup.run.device_spread or setup.wire.attack != "none"
    return bool(setup.data.shift or clients or others or links)


def _check_saved(setup: Setup) -> None:
    """Refuse options that would change a saved partition."""
    given = setup.partition
    if setup.data.public.startswith("held-out,"):
        raise JaxflError(
            f"--public {setup.data.public} does not change the saved partition {given.partition}, which "
            "holds out its own images; write --public held-out."
        )
    seed = given.partition_seed if seed_draws(setup) else PartitionOptions().partition_seed
    saved = PartitionOptions(given.partition, given.clients, seed)
    for name, value in vars(saved).items():
        if getattr(given, name) != value:
            flag = name.replace("_", "-")
            raise JaxflError(
                f"--{flag} does not change the saved partition {given.partition}, which was divided with "
                "its own; leave it out, or divide the data again (lists of rows in JSON have validation rows "
                'as "val").'
            )
