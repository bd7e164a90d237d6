//go:build linux

package main

import (
	"archive/zip"
	"bytes"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/profile"
	"plimsoll/internal/run/ghost"
)

// mutations is how many documents are mutated. In short mode each command line has shortMutations of them.
const (
	mutations      = 20_000
	shortMutations = 6
)

// mutated is a command line that reads a document. FILE stands for a mutated copy of the document, FOLDER for the
// folder of that copy, OUT for a path at which there is nothing, and MODEL, PLAN, RECORDING, SNAPSHOT and OPTIMIZER
// for whole documents. SOCKET stands for the socket of a service that answers with what is in that folder, and PYTHON
// for an interpreter that leaves what is in the folder of its argument as the record of a program.
type mutated struct {
	line      string
	documents []string // patterns of files. An element "FOLDER: pattern" takes the folder along
	ends      []int    // the exit codes that the verb documents, beside those of done and refused
}

// input is the folder of the packages that read what people bring.
const input = "../../internal/input/"

// Documents of the repository, and of a folder beside it that not every checkout has.
var (
	recipes = []string{"../../examples/*.json", "../../examples/*.yaml",
		input + "recipe/deepspeed/testdata/good/*.json",
		"../../../shared/data/configs/*.json", "../../../shared/data/configs/*.y*ml",
		"FOLDER: ../../../shared/data/reports/*/*.yaml", "../../../shared/data/topologies/*"}
	models = []string{"../../examples/config.json", input + "model/testdata/multimodal/*.json",
		input + "model/testdata/ranged-multimodal/*.json", input + "model/testdata/variants/*.json",
		input + "model/testdata/remote/*.json"}
	logs = []string{"../../examples/failures/*", "../../examples/slurm-job.txtar", "../../examples/recordings/*",
		"testdata/failures/*", "../../../shared/data/failures/*/*.txt",
		"../../../shared/data/failures/*", "../../../shared/data/reports/*/*.sh",
		"../../examples/snapshots/*"}
	snapshots  = []string{"../../examples/snapshots/*"}
	plans      = []string{"MADE plan-*.json", "../../examples/recordings/plan.json"}
	recordings = []string{"../../examples/recordings/run.jsonl"}
	machines   = []string{"../../examples/machines/*.txtar"}
	deepspeeds = []string{input + "recipe/deepspeed/testdata/good/*.json", "../../examples/zero2*.json",
		"../../../shared/data/configs/*ds*config*.json"}
	accelerates = []string{"../../examples/*.yaml", "../../../shared/data/configs/huggingface_accelerate*.yaml"}
	adapters    = []string{"../../examples/adapter_config.json", input + "recipe/deepspeed/testdata/good/*.json"}
	trainings   = []string{"../../examples/training_args.json", "../../examples/llama_factory.yaml"}
	scripts     = []string{"../../examples/megatron.sh"}
	checkpoints = []string{"FOLDER: " + input + "model/testdata/checkpoint/*"}
	archives    = []string{"MADE bundle.*"}
)

const little = " --gpus 8 --gpu H100-80GB --seq-len 256"

// mutatedLines are all ways in which verbs read files.
var mutatedLines = []mutated{
	{"plan --model MODEL --config FILE" + little, recipes, []int{exitDoesNotFit}},
	{"plan --model MODEL --config FILE --json --out OUT" + little, recipes, []int{exitDoesNotFit}},
	{"plan --model MODEL --config FILE --apply OUT --gpus 1 --gpu-memory 1GiB --gpu T4 --seq-len 256", recipes,
		[]int{exitDoesNotFit}},
	{"plan --model FILE --markdown" + little, models, []int{exitDoesNotFit}},
	{"plan --megatron FILE --gpu H100-80GB --nodes 1 --gpus 8", []string{"../../examples/megatron.sh",
		"../../../shared/data/configs/*megatron*.y*ml", "../../../shared/data/reports/*/*.sh"}, []int{exitDoesNotFit}},
	{"plan FILE --apply OUT --gpu-memory 4GiB --nodes 1 --gpus 8", scripts, []int{exitDoesNotFit}},
	{"fit --megatron FILE --gpu-memory 4GiB --nodes 1 --gpus 8 --write OUT", scripts, []int{exitDoesNotFit}},
	{"roads --megatron FILE --gpu A100-40GB --nodes 1 --gpus 8", scripts, nil},
	{"plan --model MODEL --deepspeed FILE" + little, deepspeeds, []int{exitDoesNotFit}},
	{"plan --model MODEL --training-args FILE" + little, trainings, []int{exitDoesNotFit}},
	{"plan --model MODEL --accelerate FILE" + little, accelerates, []int{exitDoesNotFit}},
	{"plan --model MODEL --adapter FILE" + little, adapters, []int{exitDoesNotFit}},
	{"plan --model MODEL --quantization FILE" + little, adapters, []int{exitDoesNotFit}},
	{"plan --model FOLDER" + little, checkpoints, []int{exitDoesNotFit}},
	{"plan --model FILE" + little, checkpoints, []int{exitDoesNotFit}},
	{"plan --gpu H100-80GB -- PYTHON FOLDER", []string{"FOLDER: testdata/played/*"}, []int{exitDoesNotFit}},
	{"plan --gpu H100-80GB --gpus 4 --nodes 2 --json -- PYTHON FOLDER", []string{"FOLDER: testdata/played/record.json"},
		[]int{exitDoesNotFit}},
	{"plan --model MODEL --factors FILE --cpu --precision fp32 --seq-len 64", []string{"MADE factors.json"},
		[]int{exitDoesNotFit}},
	{"plan --model MODEL --environment FILE" + little, []string{"testdata/environment/*"}, []int{exitDoesNotFit}},
	{"fit --model MODEL --config FILE --gpus 2 --gpu T4 --seq-len 256 --write OUT", recipes, []int{exitDoesNotFit}},
	{"fit --model FILE --gpus 1 --gpu T4 --seq-len 256", models, []int{exitDoesNotFit}},
	{"roads --model MODEL --config FILE" + little, recipes, []int{exitDoesNotFit}},
	{"roads --model MODEL --host-profile FILE" + little, []string{"MADE host.json"}, []int{exitDoesNotFit}},
	{"rehearse --model FILE --steps 0 --json", models, []int{exitDoesNotFit}},
	{"rehearse --model MODEL --deepspeed FILE --steps 0", deepspeeds, []int{exitDoesNotFit}},
	{"rehearse --model MODEL --host-profile FILE --steps 0", []string{"MADE host.json"}, []int{exitDoesNotFit}},
	{"explain FILE --html OUT", logs, []int{exitFailed}},
	{"explain FILE --model MODEL --json" + little, logs, []int{exitFailed}},
	{"explain FOLDER", []string{"FOLDER: ../../examples/failures/*", "FOLDER: ../../../shared/data/failures/*/*"},
		[]int{exitFailed}},
	{"explain FILE", archives, []int{exitFailed}},
	{"explain ../../examples/failures/dmesg.txt FILE --model MODEL", slices.Concat(recipes, models),
		[]int{exitFailed}},
	{"explain FILE RECORDING", slices.Concat(plans, recordings, machines), []int{exitFailed}},
	{"explain --diff FILE SNAPSHOT", snapshots, []int{exitFailed}},
	{"explain --diff SNAPSHOT FILE --json", snapshots, []int{exitFailed}},
	{"explain FILE --empty-cache-at peak", snapshots, []int{exitFailed}},
	{"explain FILE --top 5 --at peak", snapshots, []int{exitFailed}},
	{"explain FILE --what-if expandable_segments:True --json", snapshots, []int{exitFailed}},
	{"compare FILE RECORDING --learn OUT", plans, []int{exitDiffers}},
	{"compare PLAN FILE --html OUT", recordings, []int{exitDiffers}},
	{"compare PLAN FILE --markdown", recordings, []int{exitDiffers}},
	{"compare FILE --json", recordings, []int{exitDiffers}},
	{"export --to html FILE RECORDING --out OUT", plans, nil},
	{"export --to csv FILE", plans, nil},
	{"export --to html PLAN FILE", recordings, nil},
	{"export --to perfetto FILE", recordings, nil},
	{"export --to pprof FILE", recordings, nil},
	{"export --to prometheus FILE", recordings, nil},
	{"watch --replay FILE --once", recordings, nil},
	{"run --plan FILE --dry-run --nproc 1 -- true", plans, []int{exitDoesNotFit}},
	{"run --host-profile FILE --dry-run --nproc 1 -- true", []string{"MADE host.json"}, []int{exitDoesNotFit}},
	{"binding --ranks 2 --fsroot FILE", machines, nil},
	{"topology --fsroot FILE --json", machines, nil},
	{"checkpoint inspect FOLDER", []string{"FOLDER: ../../examples/checkpoints/step-00000003/*"}, nil},
	{"checkpoint verify FOLDER", []string{"FOLDER: ../../examples/checkpoints/step-00000003/*"}, nil},
	{"checkpoint convert FOLDER OUT --ranks 2", []string{"FOLDER: ../../examples/checkpoints/step-00000003/*"}, nil},
	{"checkpoint convert FOLDER OUT --from deepspeed --to torch",
		[]string{"FOLDER: ../../examples/deepspeed/global_step3/*"}, nil},
	{"checkpoint convert ../../examples/deepspeed OUT --from deepspeed --to deepspeed --like FOLDER",
		[]string{"FOLDER: ../../examples/deepspeed/global_step3/*"}, nil},
	{"checkpoint convert FOLDER OUT --from dcp --to deepspeed", []string{"FOLDER: ../../examples/fsdp/*",
		"FOLDER: ../../examples/fsdp/.metadata"}, nil},
	{"checkpoint convert FOLDER OUT --from megatron --to dcp", []string{"FOLDER: ../../examples/megatron/*",
		"FOLDER: ../../examples/megatron/.metadata"}, nil},
	{"checkpoint convert ../../examples/megatron OUT --from megatron --to megatron --like FOLDER",
		[]string{"FOLDER: ../../examples/megatron/*", "FOLDER: ../../examples/megatron/.metadata"}, nil},
	{"checkpoint convert FILE OUT --from torch", []string{"../../examples/torchao.pt", "MADE optimizer.pt"}, nil},
	{"checkpoint convert ../../examples/checkpoints OUT --to torch --like FILE", []string{"MADE optimizer.pt"}, nil},
	{"checkpoint convert ../../examples/checkpoints OUT --rename FILE", []string{"MADE names.*"}, nil},
	{"checkpoint convert ../../examples/checkpoints OUT --to torch --like OPTIMIZER --names FILE",
		[]string{"MADE parameters.json"}, nil},
	{"checkpoint convert OPTIMIZER OUT --from torch --weights FILE", []string{"MADE optimizer.pt",
		"../../internal/input/model/testdata/checkpoint/*.safetensors"}, nil},
	{"delta apply FILE testdata/delta/model.safetensors", []string{"testdata/delta/*.delta"}, nil},
	{"delta apply testdata/delta/00000008.delta FILE", []string{"testdata/delta/*.safetensors"}, nil},
	{"delta apply FOLDER testdata/delta/model.safetensors", []string{"FOLDER: testdata/delta/*.delta"}, nil},
	{"stat --socket SOCKET", []string{"FOLDER: MADE overview/*"}, nil},
	{"restore --socket SOCKET 1", []string{"FOLDER: MADE refusal/*", "FOLDER: MADE restored/*"}, nil},
	{"tune --output FILE --ranks 1 --parameters 4096Gi", []string{"MADE host.json"}, []int{exitDoesNotFit}},
}

// whole are flags that name no document that is read: they say what to write or where to listen.
var whole = []string{"apply", "html", "learn", "out", "perfetto", "record", "report", "snapshot", "tier", "write"}

// TestMutatedLinesReadAllThatVerbsRead: every verb with an argument or a flag for a file has a line, and so has every
// such flag.
func TestMutatedLinesReadAllThatVerbsRead(t *testing.T) {
	names := regexp.MustCompile(`(?i)\b(file|folder|path|directory)s?\b`)
	lines := ""
	for _, m := range mutatedLines {
		lines += "\n" + m.line + " "
	}
	found := 0
	for _, c := range verbs(rootCommand()) {
		verb, _ := strings.CutPrefix(c.CommandPath(), "plimsoll ")
		reads := regexp.MustCompile(`\b(FILE|PATH|RECORDING)\b`).MatchString(c.Use)
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if !names.MatchString(f.Usage) || slices.Contains(whole, f.Name) {
				return
			}
			found, reads = found+1, true
			if verb != "serve" && !strings.Contains(lines, " --"+f.Name+" ") {
				t.Errorf("no line has --%s (%s)", f.Name, verb)
			}
		})
		// TestHostileProfileOfAService has a service read.
		if reads && verb != "serve" && !strings.Contains(lines, "\n"+verb+" ") {
			t.Errorf("no line has the verb %s", verb)
		}
	}
	if found < 20 {
		t.Errorf("only %d flags name files", found)
	}
}

// TestMutatedDocuments has every verb read documents with changed bytes and values. It must end with a documented exit
// code, without a panic and an internal error, soon and in little memory.
func TestMutatedDocuments(t *testing.T) {
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(newEndings().left + mostMemory/2))
	made := madeDocuments(t)
	count := mutations/len(mutatedLines) + 1
	if testing.Short() {
		count = shortMutations
	}
	perVerb := map[string]*endings{}
	for _, m := range mutatedLines {
		verb := strings.Fields(m.line)[0]
		if perVerb[verb] == nil {
			perVerb[verb] = newEndings()
		}
		t.Run(strings.NewReplacer("../../", "", "/", "_").Replace(m.line), func(t *testing.T) {
			m.run(t, made, count, perVerb[verb])
		})
	}
	for _, verb := range slices.Sorted(maps.Keys(perVerb)) {
		t.Logf("%s: %v", verb, perVerb[verb])
	}
}

// madeDocuments writes documents that no file of the repository is, into a folder.
func madeDocuments(t *testing.T) (folder string) {
	t.Helper()
	folder = t.TempDir()
	at := func(name string) string { return filepath.Join(folder, name) }
	write := func(name, text string) {
		if err := os.WriteFile(at(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("config.json", littleLlama)
	write("names.txt", "# other names\nmodel.layers.*.mlp.weight = layers.*.mlp.weight\nmodel.norm.weight=norm\n")
	write("parameters.json", `["model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.norm.weight"]`)
	write("names.json", `{"model.layers.*.mlp.weight": "layers.*.mlp.weight"}`)
	for _, line := range []string{
		"plan --out plan-zero.json --zero 2 --zero-offload optimizer --model config.json" + little,
		"plan --out plan-fsdp.json --fsdp 2 --model config.json --pipeline-parallel 1" + little,
		"compare --learn factors.json ../../examples/recordings/plan.json ../../examples/recordings/run.jsonl",
		"checkpoint convert ../../examples/checkpoints optimizer.pt --to torch",
	} {
		fields := strings.Fields(line)
		for i, field := range fields {
			if base := filepath.Ext(field); base != "" && !strings.Contains(field, "/") {
				fields[i] = at(field)
			}
		}
		if _, said, code := runs(fields...); code == exitInput || code == exitInternal {
			t.Fatalf("%s: exit code %d, %s", line, code, said)
		}
	}
	write("whole.pickle", string(readSource(t, "../../examples/snapshots/before.pickle.gz")))
	makeHostProfile(t, at("host.json"))
	makeAnswers(t, folder)
	makeBundles(t, folder)
	makePython(t, folder)
	return folder
}

// makeBundles makes archives of a bug report's files.
func makeBundles(t *testing.T, folder string) {
	t.Helper()
	texts := map[string]string{}
	for name, path := range map[string]string{"dmesg.txt": "../../examples/failures/dmesg.txt",
		"logs/run.jsonl": "../../examples/recordings/run.jsonl"} {
		texts[name] = string(readSource(t, path))
	}
	var zipped bytes.Buffer
	archive := zip.NewWriter(&zipped)
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		file, err := archive.Create(name)
		if err == nil {
			_, err = file.Write([]byte(texts[name]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	bundle := filepath.Join(folder, "bundle.")
	if err := errors.Join(archive.Close(), os.WriteFile(bundle+"zip", zipped.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	writeBundle(t, bundle+"tgz", texts)
	tarred := unzipped(t, readSource(t, bundle+"tgz"))
	if err := os.WriteFile(bundle+"tar", tarred, 0o600); err != nil {
		t.Fatal(err)
	}
}

// makePython makes an interpreter that runs nothing: it leaves a folder's record of a program that was played before.
func makePython(t *testing.T, folder string) {
	t.Helper()
	const script = `#!/bin/sh
exec cp "$4/record.json" "$4/snapshot.pickle" "$(printf %s "$PLIMSOLL_STAGE" | sed 's/.*"scratch":"\([^"]*\)".*/\1/')"
`
	library := filepath.Join(folder, "library.so")
	if err := errors.Join(os.WriteFile(filepath.Join(folder, "python3"), []byte(script), 0o700),
		os.WriteFile(library, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Setenv(ghost.LibraryVariable, library)
}

// makeHostProfile writes what tune would have measured of a recorded machine and of this one.
func makeHostProfile(t *testing.T, path string) {
	t.Helper()
	recorded, err := host.Of("../../examples/machines/two-socket.txtar")
	if err != nil {
		t.Fatal(err)
	}
	here, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	file := &profile.File{}
	for _, h := range []*host.Host{recorded, here} {
		file.Put(profile.Profile{
			Version: "(devel)", Topology: profile.TopologyOf(h), Limits: profile.LimitsOf(h), State: "split",
			Moments: "fp32", Overlap: "none", Load: profile.LoadCommand, Command: []string{"python", "train.py"},
			LoadTimes: profile.TimeOfSteps, ShareOfBest: 0.95,
			Curves: []profile.Curve{{Ranks: 1, NUMANode: profile.AllNodes, State: "split", Moments: "fp32",
				BytesPerParameter: 26, Knee: 1,
				Points: []profile.Point{{Cores: 1, BytesPerSecond: 2.5e10, Samples: 3}}}},
			TrainerTimes: []profile.TrainerTimes{{Ranks: 1,
				Points: []profile.TrainerPoint{{Cores: 1, Seconds: 0.25, Samples: 3}}}},
			Splits: []profile.Split{{Ranks: 1, State: "split", Moments: "fp32", Trainer: 1, Optimizer: 1, Shared: true,
				BytesPerSecond: 2.5e10, Slowdown: 1}},
			Links: []profile.Link{{GPU: "0000:17:00.0", ToGPU: 2.5e10, FromGPU: 2.6e10, Together: 4.8e10}},
		})
	}
	if err := file.Save(path); err != nil {
		t.Fatal(err)
	}
	if _, err := profile.LoadOrNew(path); err != nil {
		t.Fatalf("a profile that no verb takes: %v", err)
	}
}

// source is a document that is mutated: a file, and the folder that is copied with it.
type source struct {
	folder, name string
	refused      int // mutations
}

// sources finds the documents of patterns.
func (m mutated) sources(t *testing.T, made string) (list []*source) {
	for _, pattern := range m.documents {
		pattern, withFolder := strings.CutPrefix(pattern, "FOLDER: ")
		if name, isMade := strings.CutPrefix(pattern, "MADE "); isMade {
			pattern = filepath.Join(made, name)
		}
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		if len(found) == 0 && !strings.Contains(pattern, "/shared/") { // which not every checkout has
			t.Errorf("%s: no document has such a name", pattern)
		}
		for _, path := range found {
			if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() || info.Size() > 1<<20 {
				continue
			}
			s := &source{name: path}
			if withFolder {
				s = &source{folder: filepath.Dir(path), name: filepath.Base(path)}
			}
			list = append(list, s)
		}
	}
	if len(list) == 0 {
		t.Fatal("there is no document for ", m.line)
	}
	return list
}

// run mutates documents of a command line, round and round.
func (m mutated) run(t *testing.T, made string, count int, ends *endings) {
	list, commands := m.sources(t, made), map[string]*cobra.Command{}
	folder, hash := t.TempDir(), fnv.New64a()
	_, _ = hash.Write([]byte(m.line))
	for i := range count {
		random := rand.New(rand.NewPCG(hash.Sum64(), uint64(i)))
		s, other := list[random.IntN(len(list))], list[random.IntN(len(list))]
		if other.refused < s.refused { // what the verb takes leads further than what it refuses
			s = other
		}
		path, own, text := s.copied(t, folder)
		text = mutate(random, text)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		out := filepath.Join(folder, "out")
		if err := os.RemoveAll(out); err != nil {
			t.Fatal(err)
		}
		if commands[path] == nil {
			commands[path] = parsedCommand(t, m.arguments(t, made, path, own, out))
		}
		commands[path].SetContext(t.Context())
		before := t.Failed()
		code := ends.check(t, fmt.Sprintf("%s, mutation %d of %s", m.line, i, s.name), commands[path],
			append([]int{exitDone, exitInput}, m.ends...)...)
		if code == exitInput {
			s.refused++
		}
		if t.Failed() && !before {
			m.keep(t, path, i)
		}
	}
}

// keep copies a document that a verb has failed on to where it can be looked at.
func (m mutated) keep(t *testing.T, path string, number int) {
	folder := os.Getenv("PLIMSOLL_MUTATED")
	if folder == "" {
		return
	}
	text, err := os.ReadFile(path)
	if err == nil {
		name := fmt.Sprintf("%s-%d-%s", strings.Fields(m.line)[0], number, filepath.Base(path))
		err = os.WriteFile(filepath.Join(folder, name), text, 0o600)
	}
	if err != nil {
		t.Error(err)
	}
}

// arguments are those of the command line.
func (m mutated) arguments(t *testing.T, made, path, folder, out string) []string {
	t.Helper()
	fields := strings.Fields(m.line)
	for i, field := range fields {
		if field == "SOCKET" {
			fields[i] = answering(t, folder)
		}
		if document, isNamed := map[string]string{
			"FILE": path, "FOLDER": folder, "OUT": out, "MODEL": filepath.Join(made, "config.json"),
			"PLAN": "../../examples/recordings/plan.json", "RECORDING": "../../examples/recordings/run.jsonl",
			"SNAPSHOT": filepath.Join(made, "whole.pickle"), "OPTIMIZER": filepath.Join(made, "optimizer.pt"),
			"PYTHON": filepath.Join(made, "python3"),
		}[field]; isNamed {
			fields[i] = document
		}
	}
	return fields
}

// copied makes a new copy of a document, and of its folder, and returns its text. Copies of documents of one kind have
// the same path, so that a command line is parsed once for all.
func (s *source) copied(t *testing.T, folder string) (path, own string, text []byte) {
	t.Helper()
	if s.folder == "" {
		text := readSource(t, s.name)
		return filepath.Join(folder, "document"+strings.TrimSuffix(filepath.Ext(s.name), ".gz")), folder, text
	}
	own = filepath.Join(folder, filepath.Base(s.folder))
	if err := os.RemoveAll(own); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(own, os.DirFS(s.folder)); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(own, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			err = os.Chmod(path, 0o600)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(own, s.name), own, readSource(t, filepath.Join(s.folder, s.name))
}

// readSource reads a document, which may be compressed.
func readSource(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Ext(path) != ".gz" {
		return text
	}
	return unzipped(t, text)
}

// values are numbers, texts in quotes and words that documents have as values. Each may become one of otherValues.
var values = regexp.MustCompile(`"(?:[^"\\\n]|\\.)*"|-?\b\d+(?:\.\d+)?(?:[eE][-+]?\d+)?\b|\b(?:true|false|null|None)\b`)

var otherNumbers = []string{"-1", "0", "1", "2", "3", "7", "0.5", "-0.0", "1e308", "1e999", "1e-320", "1000", "65537",
	"4294967296", "99999999999", "9223372036854775807", "9223372036854775808", "18446744073709551616"}

var otherValues = []string{"NaN", "Infinity", "null", "true", "false", `""`, `"x"`, `"auto"`, `"\u0000"`, `"1e999"`, `"-1"`, "[]", "{}", "[3]", `[[[[[[]]]]]]`, `{"a":{"b":[]}}`,
	strings.Repeat("9", 400), `"` + strings.Repeat("x", 100_000) + `"`, strings.Repeat("[", 10_000)}

// mutate changes values, lines or bytes of a document: mostly one, and up to three.
func mutate(random *rand.Rand, text []byte) []byte {
	text = slices.Clone(text)
	for left := max(1, random.IntN(6)-2); left > 0 && len(text) > 0; left-- {
		switch random.IntN(8) {
		case 0:
			text = changeBytes(random, text)
		case 1:
			text = changeLine(random, text)
		default:
			text = replaceValue(random, text)
		}
	}
	return text
}

// replaceValue replaces a value by another one.
func replaceValue(random *rand.Rand, text []byte) []byte {
	found := values.FindAllIndex(text, -1)
	if len(found) == 0 {
		return changeBytes(random, text)
	}
	at := found[random.IntN(len(found))]
	isNumber := !bytes.ContainsAny(text[at[0]:at[1]], `"tfnN`)
	switch random.IntN(4) {
	case 0:
		return slices.Replace(text, at[0], at[1], []byte(otherValues[random.IntN(len(otherValues))])...)
	case 1: // another one of the document
		from := found[random.IntN(len(found))]
		return slices.Replace(text, at[0], at[1], slices.Clone(text[from[0]:from[1]])...)
	}
	if !isNumber {
		return changeWithin(random, text, at[0], at[1])
	}
	return slices.Replace(text, at[0], at[1], []byte(otherNumbers[random.IntN(len(otherNumbers))])...)
}

// changeWithin replaces a letter of a text in quotes, or of a word.
func changeWithin(random *rand.Rand, text []byte, first, end int) []byte {
	const letters = "aZ0-_./:,*=%$\\ "
	if end-first > 2 {
		text[first+1+random.IntN(end-first-2)] = letters[random.IntN(len(letters))]
	}
	return text
}

// changeLine removes, repeats or moves a line.
func changeLine(random *rand.Rand, text []byte) []byte {
	lines := bytes.SplitAfter(text, []byte{'\n'})
	from, to := random.IntN(len(lines)), random.IntN(len(lines))
	line := lines[from]
	switch random.IntN(3) {
	case 0:
		lines = slices.Delete(lines, from, from+1)
	case 1:
		lines = slices.Insert(lines, to, line)
	default:
		lines[from], lines[to] = lines[to], lines[from]
	}
	return bytes.Join(lines, nil)
}

// changeBytes flips, inserts, removes, repeats or cuts off bytes.
func changeBytes(random *rand.Rand, text []byte) []byte {
	at := random.IntN(len(text))
	end := min(len(text), at+1+random.IntN(64))
	switch random.IntN(6) {
	case 0:
		text[at] ^= 1 << random.IntN(8)
	case 1:
		text[at] = byte(random.IntN(256))
	case 2:
		text = slices.Delete(text, at, end)
	case 3:
		text = slices.Insert(text, at, slices.Clone(text[at:end])...)
	case 4:
		text = slices.Insert(text, at, byte(random.IntN(256)), 0xff, 0)
	default:
		text = text[:at]
	}
	return text
}
