"""What is asked for becomes methods and a setup: once, whatever language it is written in."""

from collections.abc import Sequence

from jaxfl import registry
from jaxfl.config.asked import Asked, require_known
from jaxfl.config.options import declared
from jaxfl.config.setup import Setup
from jaxfl.core.protocol import Method
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError
from jaxfl.folder.variant import Variant, choose
from jaxfl.runs.setup_check import check_setup


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
    return variant, _setup(shared)


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
    return variants, _setup({name: asked[name] for name in asked if name in declared(Setup)})


def _setup(asked: Asked) -> Setup:
    setup = Setup.of(**asked)
    check_setup(setup)
    return setup
