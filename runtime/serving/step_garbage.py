"""Python's full garbage collections: between the steps of a loop, and of what is new alone."""

import gc


class StepGarbage:
    """Keeps what is alive out of collections, which take longer than a step with many adapters.

    What comes later, as a load brings, is collected and kept out of them too as soon as Python
    would look through all of it within a step. So no object is looked at twice. What is kept out
    is given back as ever when nothing refers to it; cycles among it are found after `end`.
    """

    def collect(self) -> None:
        """Collect what is new, and keep what stays of it out of later collections."""
        gc.collect()
        gc.freeze()

    def before_step(self) -> None:
        """Collect if Python is half-way to a collection of all generations."""
        if 0 < gc.get_threshold()[2] <= 2 * gc.get_count()[2]:
            self.collect()

    def end(self) -> None:
        """Leave all to Python again."""
        gc.unfreeze()
