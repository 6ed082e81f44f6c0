from tests.support.mistakes.home import GRPO, Mistake

MISTAKES: list[Mistake] = [
    ([*GRPO, "name=taken"], 2, r"taken exists: add --resume to go on with that run, or choose another --name"),
    ([*GRPO, "name=a/b"], 2, r"name: .*\(got 'a/b'\)"),
    ([*GRPO, "folder=notes.txt"], 2, r"folder=notes.txt: .* cannot be written .*choose another place"),
    ([*GRPO, "--resume", "--name", "never"], 2, r"never is not a run that can be resumed .*leave --resume out"),
    ([*GRPO, "--resume", "folder=nowhere"], 2, r"no grpo run to resume in .*nowhere: name its place with folder="),
    ([*GRPO, "--restart"], 2, r"--restart starts a run over that --resume finds: give both, or neither"),
    (["export", "split", "out"], 2, r"split: neither a checkpoint nor a run folder with checkpoints in it"),
]
