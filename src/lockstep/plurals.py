"""Numbers with their noun, in the singular or the plural."""


def counted(number: int, noun: str) -> str:
    """A number and its noun, for a message.

    Args:
        number: How many.
        noun: The regular noun, in the singular.

    Example:
        >>> counted(1, "device"), counted(2, "device"), counted(0, "batch")
        ('1 device', '2 devices', '0 batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "tch")) else "s"
    return f"{number:,} {noun}{ending}"
