"""`rlx_grpo` in a process that begins as the `rlx` command does."""

from rlx.launch import prepare, with_huge_pages

if __name__ == "__main__":
    with_huge_pages()
    prepare()
    from bench.peers.rlx_grpo import main  # after the second start, so once

    main()
