"""What lies in folders."""


def contents(folder):
    """The bytes of each file below a folder and True for each folder, by their paths there; no locks, no compiled Python."""
    found = [p for p in folder.rglob("*") if p.name != ".lock" and "__pycache__" not in p.parts]
    return {p.relative_to(folder).as_posix(): p.is_dir() or p.read_bytes() for p in found}
