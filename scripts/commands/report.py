"""Report."""


def add_command(subparsers):
    pass
