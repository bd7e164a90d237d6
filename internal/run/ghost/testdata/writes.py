"""Tries to leave something behind: files, processes, messages."""
import ctypes
import io
import multiprocessing
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import filelock
import tokenizers
import torch
import transformers

out = pathlib.Path(sys.argv[1])


def fails(what, kind):
    try:
        what()
    except kind:
        return
    raise SystemExit(f"{what} was not stopped")


with open(out / "python", "w") as file:
    file.write("text")
assert file.name == str(out / "python")
(out / "pathlib").write_text("text")
io.open(os.fsencode(out / "bytes"), "wb").close()
assert (out / "python").read_text() == "text" and os.path.getsize(out / "python") == 4 and (out / "pathlib").is_file()
with open(out / "python", "a") as file:
    file.write(" and more")
os.replace(out / "python", out / "moved")
assert not (out / "python").exists() and (out / "moved").read_text() == "text and more"
os.remove(out / "moved")
assert not (out / "moved").exists()
torch.save({"x": 1}, out / "torch")
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(out / "not" / "here")
with filelock.FileLock(out / "lock"):
    pass
os.makedirs(out / "folder" / "in" / "folder", exist_ok=True)
assert (out / "folder" / "in").is_dir() and os.listdir(out / "folder" / "in" / "folder") == []
assert not os.path.exists(out / "folder" / "else")
(out / "folder" / "in" / "file").write_text("text")
assert sorted(os.listdir(out / "folder" / "in")) == ["file", "folder"] and [e.name for e in os.scandir(out)].count("kept") == 1
os.rename(out / "folder", out / "other")
assert (out / "other" / "in" / "file").read_text() == "text" and not (out / "folder").exists()
del __file__  # else the process that is spawned runs this program
for start in ("spawn", "fork"):
    child = multiprocessing.get_context(start).Process(target=pathlib.Path.write_text, args=(out / "other" / start, "by a child"))
    child.start()
    child.join()
    assert (out / "other" / start).read_text() == "by a child"
shutil.rmtree(out / "other")
assert not (out / "other").exists() and "other" not in os.listdir(out)
(out / "touched").touch()
os.close(os.open(out / "system", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
assert (out / "touched").exists() and (out / "system").exists()
fails(lambda: os.open(out / "system", os.O_CREAT | os.O_EXCL | os.O_WRONLY), FileExistsError)
assert ctypes.CDLL(None).open(os.fsencode(out / "library"), os.O_CREAT | os.O_WRONLY, 0o600) < 0
fails(lambda: os.unlink(out / "kept"), PermissionError)
with open(out / "kept", "r+") as file:
    file.write("other")
assert (out / "kept").read_text() == "other"
fails(lambda: os.mkdir("/dev/plimsoll-test"), PermissionError)
assert subprocess.run(["sh", "-c", f"echo text > {out}/shell"], stderr=subprocess.DEVNULL).returncode != 0
fails(lambda: socket.create_connection(("192.0.2.1", 80), timeout=60), OSError)
assert "LD_PRELOAD" not in os.environ
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", str(out)])
cache = pathlib.Path(os.environ["HF_DATASETS_CACHE"])
assert (cache / "prepared" / "data").read_text() == "theirs"
os.close(os.open(cache / "prepared" / "lock", os.O_CREAT | os.O_WRONLY))
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
