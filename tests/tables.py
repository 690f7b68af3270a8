"""Tables of the tests."""


class Table(dict):
    """A table of functions that make cases, and no state of the code of a model.

    What a module of the user's holds goes to the processes of other devices whenever it may have
    changed. A table that cannot be pickled stays here, which took most of the time of the tests.
    """

    def __reduce__(self):
        raise TypeError("a table stays in the process of the tests")
