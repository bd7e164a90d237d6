// Runs the program in a worker, as a shell would: with arguments, and with files that are in memory only. The system
// calls of Go's WebAssembly go to globalThis.fs, which has the interface of node's.
"use strict";

const files = new Map(), opened = new Map();
let output, nextDescriptor;

// A model's config.json is named for its folder.
const folder = "/job";

function resolve(path) {
  if (!path.startsWith("/")) path = folder + "/" + path;
  return "/" + path.split("/").filter((part) => part !== "" && part !== ".").join("/");
}

function failure(code) { return Object.assign(new Error(code), { code }); }

// find returns the text of a file, null for a folder, and undefined for what is not there.
function find(path) {
  if (files.has(path)) return files.get(path);
  const below = path === "/" ? "/" : path + "/";
  return path === folder || [...files.keys()].some((name) => name.startsWith(below)) ? null : undefined;
}

function status(text) {
  const isFolder = text === null, size = isFolder ? 0 : text.length;
  return {
    isDirectory: () => isFolder, mode: isFolder ? 0o040755 : 0o100644, size, dev: 0, ino: 0, nlink: 1, uid: 0, gid: 0,
    rdev: 0, blksize: 4096, blocks: Math.ceil(size / 512), atimeMs: 0, mtimeMs: 0, ctimeMs: 0,
  };
}

function joined(before, bytes) {
  const all = new Uint8Array(before.length + bytes.length);
  all.set(before);
  all.set(bytes, before.length);
  return all;
}

const constants = { O_WRONLY: 1, O_RDWR: 2, O_CREAT: 64, O_EXCL: 128, O_TRUNC: 512, O_APPEND: 1024, O_DIRECTORY: 65536 };

// calls are the system calls that return at once. All others are refused.
const calls = {
  stat(path) {
    const text = find(resolve(path));
    if (text === undefined) throw failure("ENOENT");
    return status(text);
  },
  open(path, flags) {
    const name = resolve(path), text = find(name);
    if (text === undefined && !(flags & constants.O_CREAT)) throw failure("ENOENT");
    if (text !== undefined && flags & constants.O_EXCL) throw failure("EEXIST");
    if (text === undefined || flags & constants.O_TRUNC) files.set(name, new Uint8Array());
    opened.set(nextDescriptor, { name, at: 0 });
    return nextDescriptor++;
  },
  fstat(descriptor) {
    const file = opened.get(descriptor);
    return status(file ? find(file.name) : new Uint8Array());
  },
  read(descriptor, buffer, offset, length, position) {
    const file = opened.get(descriptor);
    if (!file) return 0; // standard input is empty
    const text = files.get(file.name), at = position ?? file.at;
    const bytes = text.subarray(at, at + length);
    buffer.set(bytes, offset);
    if (position === null) file.at += bytes.length;
    return bytes.length;
  },
  write(descriptor, buffer, offset, length) {
    const bytes = buffer.subarray(offset, offset + length), file = opened.get(descriptor);
    if (file) files.set(file.name, joined(files.get(file.name), bytes));
    else output[descriptor] = joined(output[descriptor], bytes);
    return length;
  },
  readdir(path) {
    const start = resolve(path) === "/" ? "/" : resolve(path) + "/";
    const below = [...files.keys()].filter((name) => name.startsWith(start));
    return [...new Set(below.map((name) => name.slice(start.length).split("/")[0]))];
  },
  close(descriptor) { opened.delete(descriptor); },
};
calls.lstat = calls.stat;

globalThis.fs = new Proxy({ constants, writeSync: (descriptor, buffer) => calls.write(descriptor, buffer, 0, buffer.length) }, {
  get(own, name) {
    return own[name] ?? ((...values) => {
      const answer = values.pop();
      try {
        if (!calls[name]) throw failure("ENOSYS");
        answer(null, calls[name](...values));
      } catch (error) {
        answer(error);
      }
    });
  },
});
globalThis.path = { resolve };
globalThis.process = { pid: 1, ppid: 0, getuid: () => 0, getgid: () => 0, geteuid: () => 0, getegid: () => 0,
  getgroups: () => [], umask: () => 0o022, cwd: () => folder, chdir() { throw failure("ENOSYS"); } };

// run answers one question. A fresh instance of the module has nothing of earlier ones.
async function run({ module, arguments: given, texts, result }) {
  files.clear();
  opened.clear();
  output = { 1: new Uint8Array(), 2: new Uint8Array() };
  nextDescriptor = 3;
  for (const [name, text] of Object.entries(texts)) files.set(resolve(name), new TextEncoder().encode(text));
  const go = new Go();
  let code = 0;
  go.argv = ["plimsoll", ...given];
  go.exit = (ended) => { code = ended; };
  await go.run(await WebAssembly.instantiate(module, go.importObject));
  for (const timer of go._scheduledTimeouts.values()) clearTimeout(timer); // nothing is left to wake
  const decoder = new TextDecoder();
  const html = files.get(resolve(result));
  return { code, stdout: decoder.decode(output[1]), stderr: decoder.decode(output[2]),
    html: html ? decoder.decode(html) : "" };
}

globalThis.onmessage = async (event) => {
  try {
    globalThis.postMessage(await run(event.data));
  } catch (error) {
    globalThis.postMessage({ code: 1, stdout: "", stderr: String(error), html: "" });
  }
};
