// The form: what is typed becomes the arguments and files of the program, which a worker runs.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const form = byId("form"), status = byId("status"), frame = byId("report");
  const result = "/.plimsoll.html"; // where the program writes its report
  let module, worker = null, isRunning = false, timer = 0, answer = null;

  // --- the question ---

  function fields() { return [...form.querySelectorAll("[data-flag]")]; }

  function verb() { return form.elements.verb.value; }

  function givenFiles() {
    return [...byId("files").children].map((item) => ({
      name: item.querySelector(".name").value.trim(), use: item.querySelector(".use").value,
      text: item.querySelector(".text").value,
    }));
  }

  // words splits a command line as a shell does, with quotes and without variables.
  function words(line) {
    return [...line.matchAll(/(?:"[^"]*"|'[^']*'|[^\s"'])+/g)].map(([word]) => word.replace(/"([^"]*)"|'([^']*)'/g, "$1$2"));
  }

  // question returns the arguments as they are typed in a shell, without what the page adds.
  function question() {
    const list = [verb()];
    for (const field of fields()) {
      if (field.type === "checkbox" ? field.checked : field.value.trim() !== "") {
        list.push(field.type === "checkbox" ? `--${field.dataset.flag}` : `--${field.dataset.flag}=${field.value.trim()}`);
      }
    }
    for (const file of givenFiles()) {
      if (file.use === "config") list.push(file.name);
      else if (file.use !== "") list.push(`--${file.use}=${file.name}`);
    }
    return list.concat(words(byId("flags").value));
  }

  function quoted(word) { return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`; }

  // --- the answer ---

  function start() {
    worker = new Worker(URL.createObjectURL(new Blob([byId("worker").textContent], { type: "text/javascript" })));
    worker.onmessage = (event) => { isRunning = false; show(event.data); };
    worker.onerror = (event) => { isRunning = false; show({ code: 1, stdout: "", stderr: event.message, html: "" }); };
  }

  function say(text, isVerdict) {
    status.textContent = text;
    status.classList.toggle("verdict", isVerdict);
  }

  // ask drops an answer that is on its way, and asks anew.
  function ask() {
    if (!module) return;
    if (isRunning) worker.terminate();
    if (isRunning) start();
    isRunning = true;
    say(verb() === "fit" ? "Searching ..." : "Planning ...", false);
    delete document.documentElement.dataset.answered;
    byId("answer").setAttribute("aria-busy", "true");
    worker.postMessage({ module, result, arguments: [...question(), "--json", "--html", result],
      texts: Object.fromEntries(givenFiles().map((file) => [file.name, file.text])) });
  }

  // --- the ladder ---

  let made = []; // rungs whose switches are on: their flags are among those of the form

  function gibibytes(bytes) { return `${(bytes / 2 ** 30).toFixed(1)} GiB`; }

  // wordsOf returns the flags of a rung, or null if it edits a file or takes a flag back.
  function wordsOf(rung) {
    const list = rung.flags.flatMap(words);
    return rung.edits.length === 0 && list[0]?.startsWith("--") ? list.join(" ") : null;
  }

  // effect says what a rung does, in words.
  function effect(rung) {
    const left = { fits: "then it fits", tight: "then it is tight" }[rung.verdict] ?? `then ${gibibytes(rung.lacks_bytes)} are lacking`;
    const otherwise = rung.cost === "training" ? "; the training is another one" : "";
    return `${rung.why}: frees ${gibibytes(Math.max(rung.frees_bytes, rung.frees_in_phase_bytes))}, ${left}${otherwise}`;
  }

  // flip adds the flags of a rung to those of the form, or takes them away.
  function flip(rung, isOn) {
    const line = byId("flags"), text = wordsOf(rung);
    line.value = isOn ? `${line.value} ${text}`.trim() : ` ${line.value} `.replace(` ${text} `, " ").trim();
    made = made.filter((other) => other !== rung);
    if (isOn) made.push(rung);
  }

  function rungItem(rung, isOn) {
    const item = document.createElement("li"), label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox";
    box.checked = isOn;
    box.disabled = wordsOf(rung) === null;
    box.addEventListener("input", (event) => { event.stopPropagation(); flip(rung, box.checked); changed(); });
    const edits = rung.edits.map((edit) => `${edit.file}: ${edit.key} ${edit.to}`);
    label.append(box, ` ${effect(rung)}`, edits.length > 0 ? ` (${edits.join(", ")})` : "");
    item.append(label);
    return item;
  }

  // showLadder shows the changes that were made, and those that are left.
  function showLadder(document) {
    made = made.filter((rung) => ` ${byId("flags").value} `.includes(` ${wordsOf(rung)} `));
    const left = document.ladder?.rungs ?? [];
    byId("ladder").hidden = made.length + left.length === 0;
    byId("ladder").querySelector("ol").replaceChildren(...made.map((rung) => rungItem(rung, true)),
      ...left.map((rung) => rungItem(rung, false)));
    byId("all-rungs").hidden = !left.some((rung) => wordsOf(rung) !== null);
    byId("all-rungs").onclick = () => {
      for (const rung of left) if (wordsOf(rung) !== null) flip(rung, true);
      changed();
    };
  }

  // --- examples ---

  byId("examples").addEventListener("click", (event) => {
    const of = event.target.dataset;
    if (of.model === undefined) return;
    form.elements.verb.value = "plan";
    for (const field of fields()) {
      const name = field.dataset.flag.replace(/-(.)/g, (_, letter) => letter.toUpperCase());
      if (field.type === "checkbox") field.checked = false;
      else field.value = of[name] ?? "";
    }
    byId("flags").value = of.more;
    byId("files").replaceChildren();
    changed();
  });

  function show(found) {
    answer = found;
    showLadder(found.html === "" ? {} : JSON.parse(found.stdout));
    const failed = found.html === "";
    if (failed) say("", false);
    byId("error").textContent = found.stderr;
    byId("error").hidden = found.stderr === "";
    byId("json").textContent = found.stdout;
    byId("document").hidden = failed;
    frame.hidden = failed;
    if (!failed) frame.srcdoc = found.html;
    byId("answer").setAttribute("aria-busy", "false");
    document.documentElement.dataset.code = String(found.code);
    document.documentElement.dataset.answered = String(Math.round(performance.now()));
  }

  // The report is as high as it needs to be: there is one scroll bar. Its verdict is said to screen readers.
  frame.addEventListener("load", () => {
    const body = frame.contentDocument.documentElement, verdict = body.querySelector(".verdict");
    if (verdict) say(verdict.textContent, true);
    const fit = () => { frame.style.height = `${Math.ceil(body.getBoundingClientRect().height) + 4}px`; };
    new ResizeObserver(fit).observe(body);
    fit();
  });

  function save(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
  }
  byId("save-html").addEventListener("click", () => save("plimsoll.html", "text/html", answer.html));
  byId("save-json").addEventListener("click", () => save("plimsoll.json", "application/json", answer.stdout));

  // --- files ---

  // useOf returns the flag that takes a text. The program recognizes all files but those of a model by their content.
  function useOf(text) {
    try {
      const keys = JSON.parse(text);
      return "model_type" in keys && !("output_dir" in keys) ? "model" : "config";
    } catch {
      return "config";
    }
  }

  function addFile(name, text, use = useOf(text)) {
    const taken = new Set(givenFiles().map((file) => file.name));
    for (let n = 2, base = name; taken.has(name); n++) name = base.replace(/(\.[^.]*)?$/, `-${n}$1`);
    const item = byId("file").content.cloneNode(true).firstElementChild;
    item.querySelector(".name").value = name;
    item.querySelector(".text").value = text;
    item.querySelector(".use").value = use;
    item.querySelector(".text").addEventListener("change", (event) => {
      if (item.querySelector(".use").value !== "") item.querySelector(".use").value = useOf(event.target.value);
      changed();
    });
    item.querySelector("button").addEventListener("click", () => { item.remove(); changed(); });
    byId("files").append(item);
    return item;
  }

  async function addAll(list) {
    for (const file of list) addFile(file.name, await file.text());
    changed();
  }
  byId("choose").addEventListener("change", (event) => { addAll([...event.target.files]); event.target.value = ""; });
  byId("paste").addEventListener("click", () => addFile("pasted.json", "").querySelector(".text").focus());
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => { event.preventDefault(); addAll([...event.dataTransfer.files]); });
  addEventListener("paste", (event) => {
    if (event.target.matches("input, textarea") || !event.clipboardData.getData("text")) return;
    addFile("pasted.json", event.clipboardData.getData("text"));
    changed();
  });

  // --- the link ---

  async function through(bytes, stream) {
    return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
  }

  async function toLink() {
    const values = Object.fromEntries(fields().map((f) => [f.dataset.flag, f.type === "checkbox" ? f.checked : f.value]));
    const state = JSON.stringify({ verb: verb(), values, flags: byId("flags").value, files: givenFiles() });
    const bytes = await through(new TextEncoder().encode(state), new CompressionStream("deflate-raw"));
    const text = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
    return "#" + text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  }

  // decoded returns bytes of base64. Uint8Array.from would take a second for the program.
  function decoded(text) {
    const letters = atob(text), bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    return bytes;
  }

  async function fromLink() {
    byId("damaged").hidden = true;
    if (location.hash.length < 2) return;
    try {
      const text = location.hash.slice(1).replaceAll("-", "+").replaceAll("_", "/");
      const bytes = await through(decoded(text), new DecompressionStream("deflate-raw"));
      const state = JSON.parse(new TextDecoder().decode(bytes));
      form.elements.verb.value = state.verb;
      for (const field of fields()) {
        if (field.type === "checkbox") field.checked = state.values[field.dataset.flag] === true;
        else field.value = state.values[field.dataset.flag] ?? "";
      }
      byId("flags").value = state.flags;
      byId("files").replaceChildren();
      for (const file of state.files) addFile(file.name, file.text, file.use);
    } catch {
      byId("damaged").hidden = false;
    }
  }

  // changed follows the form: the command at once, the link and the answer when nothing more is typed.
  function changed() {
    byId("command").textContent = ["plimsoll", ...question()].map(quoted).join(" ");
    byId("advise").disabled = verb() === "fit";
    if (byId("advise").disabled) byId("advise").checked = false;
    clearTimeout(timer);
    timer = setTimeout(async () => {
      ask();
      history.replaceState(null, "", await toLink());
    }, 250);
  }
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", async () => { await fromLink(); changed(); });

  async function load() {
    start();
    const packed = new Blob([decoded(byId("program").textContent.trim())]);
    byId("program").remove();
    const program = packed.stream().pipeThrough(new DecompressionStream("gzip"));
    module = await WebAssembly.compileStreaming(new Response(program, { headers: { "Content-Type": "application/wasm" } }));
    byId("command").textContent = ["plimsoll", ...question()].map(quoted).join(" ");
    document.documentElement.dataset.loaded = String(Math.round(performance.now()));
    ask();
  }
  fromLink().then(load).catch((error) => {
    byId("error").textContent = `The planner cannot start in this browser: ${error}`;
    byId("error").hidden = false;
    say("", false);
  });
})();
