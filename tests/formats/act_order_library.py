"""compressed-tensors before 0.19: codes of a group in the order of g_idx."""

from formats.checks import check_fixtures
from formats.compressed_tensors_library import read

if __name__ == "__main__":
    check_fixtures("compressed-tensors", read)
