package recipe

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
)

// onHub matches the address of a model on the Hugging Face hub.
var onHub = lazyregexp.New(`^https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+?)/?$`)

// insteadOf says what to give in place of a file that is not here: one beside it with another ending or a letter or two
// between them, or what a word that is no path may have been meant as.
func insteadOf(path string) string {
	const usual = "give the path of a configuration"
	entries, _ := os.ReadDir(filepath.Dir(path))
	stem := func(name string) string { return strings.TrimSuffix(name, filepath.Ext(name)) }
	name := filepath.Base(path)
	for _, e := range entries[:min(len(entries), mostBeside)] {
		if other := e.Name(); filepath.Ext(name) != "" && !e.IsDir() &&
			(stem(other) == stem(name) || fault.Misspells(name, other, 2)) {
			return "did you mean " + filepath.Join(filepath.Dir(path), other) + "?"
		}
	}
	switch {
	case ways[strings.ToLower(path)] != "":
		return "did you mean " + ways[strings.ToLower(path)] + "?"
	case slices.Contains(strings.Fields("true false yes no on off"), strings.ToLower(path)):
		return "a flag that may stand alone takes its value with =, such as --flag=value"
	case strings.Contains(path, " ") && !strings.ContainsAny(path, `/\.`),
		strings.HasSuffix(path, "?") && strings.Contains(path, " "):
		return "plimsoll reads no sentences: name a model and a GPU, such as 'plimsoll plan llama-3-8b RTX-4090 " +
			"--gpus 4'"
	case !strings.ContainsAny(path, `/\.`):
		return usual + "; the name of a model or of a GPU is one word, such as qwen3-8b or H100-80GB"
	}
	return usual
}

// ways are words for flags that people give without dashes.
var ways = map[string]string{"lora": "--lora", "qlora": "--qlora", "4bit": "--qlora", "fsdp": "--fsdp",
	"fsdp2": "--fsdp 2", "zero1": "--zero 1", "zero2": "--zero 2", "zero3": "--zero 3", "bf16": "--precision bf16",
	"fp16": "--precision amp-fp16", "fp32": "--precision fp32", "cpu": "--cpu"}

// mostBeside is how many files of a folder are looked at for a name that may have been meant.
const mostBeside = 1 << 12

// Detect returns the flag for the configuration at path, by its content: "--deepspeed", "--accelerate",
// "--training-args", "--adapter", "--quantization" or "--model". It is "--config" for a file that LoadFramework reads.
// A file of any other kind is refused with what it is. Texts may stand for files. Every error is a *fault.Input.
func Detect(path string, texts files.Texts) (flag string, err error) {
	text, err := texts.Read(path, largest)
	var other *files.NotRegular
	switch {
	case errors.Is(err, fs.ErrNotExist) && strings.Contains(path, "://"):
		hint := "download the file first, and give its path"
		if m := onHub.FindStringSubmatch(path); m != nil {
			hint = "if it is a model's, give it as --model " + m[1]
		}
		return "", fault.Inputf("%s is an address, expected a file", path).WithHint(hint)
	case errors.Is(err, fs.ErrNotExist):
		return "", fault.File(path).Inputf("there is no such file").WithHint(insteadOf(path))
	case errors.As(err, &other):
		return "", fault.File(path).Inputf("%v", other).
			WithHint("name the files in it, or give a model's folder as --model")
	case err != nil:
		return "", &fault.Input{Where: fault.Position{File: path}, Err: err}
	}
	d := parseContent(path, text)
	switch {
	case (d == nil || d.Root.Kind != '{') && isScript(path, text):
		return "", unplannedScript(path, text)
	case d == nil && isTOML(path):
		return "", unreadable(path, text)
	case d == nil && strict.IsYAML(path):
		return "", unclear(path, text)
	case d == nil || d.Root.Kind != '{':
		what := nature(text)
		if what == "" && d != nil {
			what = "a document with " + summary(d.Root)
		}
		if what == "" {
			return "", unreadable(path, text)
		}
		return "", noConfiguration(path, what, text)
	}
	found, m := recognized(d.Root)
	if found != nil && strict.IsYAML(path) && slices.Contains(onlyJSON, found) && !bytes.HasPrefix(
		bytes.TrimSpace(text), []byte{'{'}) {
		return "", d.Inputf(m.At, "this is YAML, with the key %q of %s, which is JSON", m.Name, article(found.Name)).
			WithHint("give a file that the program of the key reads")
	}
	switch {
	case found != nil && found.Flag == "" && isScript(path, text):
		return "", unplannedScript(path, text)
	case found == nil:
		var names []string
		for _, m := range d.Root.Members[:min(3, len(d.Root.Members))] {
			names = append(names, quotedKey(m.Name))
		}
		return "", d.Inputf(d.Root.At, "plimsoll knows no training configuration with the keys %s",
			strings.Join(names, ", ")).WithHint(readable)
	case found.Flag == "":
		return "", found.unread(d, m)
	}
	return found.Flag, nil
}

// looksLikeKey matches what people name keys. A line of another file, such as of passwords, does not look like one.
var looksLikeKey = lazyregexp.New(`^[A-Za-z_][\w.\-/ ]*$`)

// quotedKey returns a key for a message. It quotes nothing that may be a line of a file that is no configuration.
func quotedKey(name string) string {
	if !looksLikeKey.MatchString(name) {
		return fmt.Sprintf("one of %d bytes that is no name", len(name))
	}
	return fmt.Sprintf("%.40q", name)
}

// summary returns what a document is, without a text that may be lines of a file of the system: those have colons.
func summary(root *strict.Value) string {
	if root.Kind == '"' && strings.Contains(root.Text, ":") {
		return "a text"
	}
	return root.String()
}

// unclear returns why YAML is refused that cannot be parsed: what it is, if it is of a kind that plimsoll does not
// read, or else why it cannot be parsed.
func unclear(path string, text []byte) error {
	if d := strict.Skim(path, text); d != nil {
		if found, m := recognized(d.Root); found != nil && found.Flag == "" {
			return found.unread(d, m)
		}
	}
	if what := nature(text); what != "" {
		return noConfiguration(path, what, text)
	}
	_, err := strict.ParseYAML(path, text)
	return err
}

// noConfiguration refuses a file by its nature.
func noConfiguration(path, what string, text []byte) error {
	hint := readable
	if what == pythonSource {
		if name := calledClass(path, text); name != "" {
			return fault.File(path).Inputf("this is %s that calls %s, which is not planned on paper", what, name).
				WithHint(asPython(path, text))
		}
		return fault.File(path).Inputf("this is %s that calls no trainer of transformers, TRL or Unsloth: expected a "+
			"configuration of a training", what).WithHint(asPython(path, text))
	}
	if what == script || what == shellScript || what == commandArguments {
		hint += "; give a script or arguments of Megatron-LM as --megatron"
	}
	return fault.File(path).Inputf("this is %s: expected a configuration of a training", what).WithHint(hint)
}

// calledClass returns the class of the trainer of a library that a source calls and no kind reads, "" for none.
func calledClass(path string, text []byte) string {
	source, _ := readPython(path, text, nil)
	if source == nil {
		return ""
	}
	for _, c := range source.Calls {
		if name := c.Name(); c.From == nil && strings.HasSuffix(name, "Trainer") && strings.Contains(c.Class, ".") {
			return strings.TrimPrefix(c.Class, "__main__.")
		}
	}
	return ""
}

// asPython says how a program in Python is planned: as it runs, or by a call in it. A file of torchtitan's functions is
// no program by itself.
func asPython(path string, text []byte) string {
	program := "python " + path
	if source, _ := readPython(path, text, nil); source != nil {
		if names := configurationsOf(source); len(names) > 0 {
			return fmt.Sprintf("it has recipes of Megatron-Bridge: give one of its %d functions, such as %s:%s",
				len(names), path, names[0])
		}
		if names := nemoRecipesOf(source); len(names) > 0 {
			return fmt.Sprintf("it has recipes of NeMo 2: give one of its functions, such as %s:%s", path, names[0])
		}
	}
	if titanFunction.Match(text) {
		program = "python -m torchtitan.train --module MODULE --config FUNCTION"
	}
	return fmt.Sprintf("'plimsoll plan --gpu NAME --gpus N -- %s' plans it as it runs, without a GPU; or give its "+
		"model to plimsoll.plan in Python, or name it by --model and say the rest by flags", program)
}

// titanFunction matches a function that returns a configuration of torchtitan since 0.3.
var titanFunction = lazyregexp.New(`(?m)^def \w+\(.*\) -> (?:\w+\.)?Trainer\.Config:`)

// unread refuses a file of a kind that plimsoll does not read, which the member m shows.
func (k *Kind) unread(d *strict.Document, m *strict.Member) error {
	return d.Inputf(m.At, "this seems to be %s, as it has the key %q, which plimsoll does not read",
		article(k.Name), m.Name).WithHint(cmp.Or(k.Instead, readable))
}

// unreadable returns why a text is neither JSON nor YAML.
func unreadable(path string, text []byte) error {
	parse := strict.ParseYAML
	switch {
	case bytes.HasPrefix(bytes.TrimSpace(text), []byte{'{'}):
		parse = strict.ParseCommented
	case isTOML(path):
		parse = strict.ParseTOML
	}
	_, err := parse(path, text)
	return err
}

const readable = "plimsoll reads configurations of LLaMA-Factory, axolotl, ms-swift, TRL, verl, torchtune, " +
	"torchtitan, LitGPT, " +
	"DeepSpeed, accelerate, TrainingArguments, PEFT and bitsandbytes"

var (
	pythonLine   = lazyregexp.New(`(?m)^(?:import \w|from [\w.]+ import |def \w+\(|class \w+[(:])`)
	markdownLine = lazyregexp.New("(?m)^(?:#{1,6} \\S.*\\n\\s*\\n|```)")
	sectionLine  = lazyregexp.New(`(?m)^\[+[A-Za-z][\w.\- "]*\]+\s*(?:#.*)?$`)
	argumentLine = lazyregexp.New(`^--?[A-Za-z][\w-]*[ =\n]`)
	shellLine    = lazyregexp.New(`(?m)^\s*(?:export \w+=|set -[eux]|[A-Z_]+=\S+ |` +
		`(?:accelerate launch|torchrun|deepspeed|python3?|pip|swift|megatron|trl|llamafactory-cli) )`)
)

// Natures of files that may hold arguments of a program.
const (
	script           = "a script"
	pythonSource     = "Python source"
	shellScript      = "a shell script"
	commandArguments = "a list of arguments of a command"
)

// nature returns what a text is that is no configuration, or "".
func nature(text []byte) string {
	start := bytes.TrimSpace(text)
	switch {
	case bytes.HasPrefix(start, []byte("#!")):
		return script
	case bytes.IndexByte(text, 0) >= 0:
		return "a binary file"
	case bytes.HasPrefix(start, []byte{'{'}):
		return "" // JSON, perhaps with a mistake
	case pythonLine.Match(text):
		return pythonSource
	case shellLine.Match(text):
		return shellScript
	case argumentLine.Match(start):
		return commandArguments
	case sectionLine.Match(text):
		return "TOML or INI"
	case markdownLine.Match(text):
		return "Markdown"
	case bytes.HasPrefix(start, []byte{'['}):
		return "a list"
	}
	return ""
}
