"""Touches huge pages that the pool does not have: SIGBUS."""

import mmap

MAP_NORESERVE, MAP_HUGETLB = 0x4000, 0x40000


def main() -> None:
    memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_HUGETLB)
    print("touching", flush=True)
    memory[0] = 1


if __name__ == "__main__":
    main()
