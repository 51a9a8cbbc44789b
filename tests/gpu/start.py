"""A start of a toy engine on a GPU, in a process of its own: prints the kernels loaded and those compiled."""

from triton import knobs

from tests.gpu.toy import PROMPTS, Local


def main() -> None:
    cache_hits: list[bool] = []
    knobs.compilation.listener = lambda **event: cache_hits.append(event["cache_hit"])
    Local().complete(PROMPTS[:3])
    print(len(cache_hits), cache_hits.count(False))


if __name__ == "__main__":
    main()
