"""The interface of hooks: what only some runs do, called from fixed places of the training loop."""

from collections.abc import Iterable


class Hook:
    """Override what you need. Every rank has the same hooks and calls them in the same order.

    `iteration` is the number of iterations done: 0 before the first step of a run that starts from nothing.
    """

    def on_start(self, iteration: int) -> None:
        """Training begins; called once."""

    def before_step(self, iteration: int) -> None:
        """Step number `iteration` + 1 comes next."""

    def after_step(self, iteration: int) -> None:
        """Step number `iteration` is queued; the device may still be at work on it."""

    def before_evaluate(self, iteration: int) -> None:
        """An evaluation comes next."""

    def after_evaluate(self, iteration: int) -> None:
        """An evaluation ended."""

    def after_save(self, iteration: int) -> None:
        """A checkpoint of this iteration is complete."""

    def on_exit(self, iteration: int) -> None:
        """Training ended, also by an exception; called once if `on_start` was."""


class Hooks(Hook):
    """Several hooks as one; on the way out they are called in reverse order, each even if another failed."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.hooks = tuple(hooks)

    def on_start(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.on_start(iteration)

    def before_step(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.before_step(iteration)

    def after_step(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.after_step(iteration)

    def before_evaluate(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.before_evaluate(iteration)

    def after_evaluate(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.after_evaluate(iteration)

    def after_save(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.after_save(iteration)

    def on_exit(self, iteration: int) -> None:
        errors = []
        for hook in reversed(self.hooks):
            try:
                hook.on_exit(iteration)
            except Exception as error:  # the other hooks still have things to put back
                errors.append(error)
        if errors:
            raise errors[0]
