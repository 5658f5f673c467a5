"""Surfaces of other libraries on heedful's pieces, for scripts that outlived theirs. Nothing of heedful imports them."""
