package main

import (
	"bytes"
	"context"
	_ "embed" // of the program
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/run/ghost"
)

//go:embed trainer.py
var trainer []byte

// command is how jobs are planned.
type command struct {
	python, catalog, gpu string
	snapshot             string // a file for the history of the GPU's memory
	chosen               func(row) bool
}

// compared is a job with its two plans.
type compared struct {
	row
	hand, program figures
	failed        string
}

// figures are what the GPU of rank 0 holds at most in each phase of the training loop.
type figures map[string]figure

// figure has the allocated and the reserved bytes of a phase.
type figure [2]ledger.Bytes

const (
	allocated = iota
	reserved
)

// levels are the two of a figure.
var levels = []string{"allocated", "reserved"}

// peak returns the most of any phase.
func (f figures) peak(level int) (most ledger.Bytes) {
	for _, of := range f {
		most = max(most, of[level])
	}
	return most
}

// String is the peaks.
func (f figures) String() string {
	return fmt.Sprintf("allocated %v, reserved %v", f.peak(allocated), f.peak(reserved))
}

func (c command) compare(r row) compared {
	result := compared{row: r}
	var err error
	if result.hand, _, err = c.byHand(r); err == nil {
		result.program, err = c.byProgram(r)
	}
	if err != nil {
		result.failed = err.Error()
	}
	return result
}

// inFolder calls a function with a folder that has the files of a job.
func (c command) inFolder(r row, use func(folder string) error) error {
	folder, err := os.MkdirTemp("", "plimsoll-rows-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	for name, text := range c.files(r, folder) {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return err
		}
	}
	return use(folder)
}

// files are what both plans read.
func (c command) files(r row, folder string) map[string][]byte {
	list := map[string][]byte{}
	add := func(name string, content document) {
		text, err := json.Marshal(content)
		if err != nil {
			log.Fatal(err)
		}
		list[name] = text
	}
	add("model/config.json", c.config(r))
	if r.Arguments != nil {
		arguments := always.with(r.Arguments)
		if r.DeepSpeed != nil {
			arguments["deepspeed"] = filepath.Join(folder, "deepspeed.json")
			add("deepspeed.json", r.zeroed())
		}
		add("arguments.json", arguments)
	}
	if r.Accelerate != nil {
		add("accelerate.yaml", r.launched())
	}
	if r.TRL != nil {
		add("sft.yaml", always.with(r.TRL).with(document{"model_name_or_path": filepath.Join(folder, "model"),
			"dataset_name": "made/up", "max_length": r.Sequence}))
	}
	for name, content := range map[string]document{"loop.json": r.Loop, "quantization.json": r.Quantization,
		"adapter/adapter_config.json": r.Adapter} {
		if content != nil {
			add(name, content)
		}
	}
	return list
}

// config is the configuration of a job's model.
func (c command) config(r row) document {
	text, err := os.ReadFile(filepath.Join(c.catalog, r.Model+".json"))
	var config document
	if err == nil {
		err = json.Unmarshal(text, &config)
	}
	if err != nil {
		log.Fatal(err)
	}
	return config.with(r.Config)
}

// boundless is more memory than any job takes: the plans are to differ in what a job holds, and not in whether it fits.
const boundless = 1 * ledger.TiB

// byHand plans a job by the planner's own model.
func (c command) byHand(r row) (figures, *plan.Plan, error) {
	var p *plan.Plan
	err := c.inFolder(r, func(folder string) error {
		decided, err := c.request(r, folder).Resolve()
		if err == nil {
			p, err = plan.New(decided)
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	return figuresOf(p.Devices), p, nil
}

// request says a job to the planner.
func (c command) request(r row, folder string) job.Request {
	at := func(name string, of document) string {
		if of == nil {
			return ""
		}
		return filepath.Join(folder, name)
	}
	q := job.Request{Model: filepath.Join(folder, "model"), GPU: c.gpuOf(r), GPUs: max(1, r.GPUs), GPUMemory: boundless,
		Sequence: r.Sequence, TrainingArgs: at("arguments.json", r.Arguments), Accelerate: at("accelerate.yaml",
			r.Accelerate), DeepSpeed: at("deepspeed.json", r.DeepSpeed), Adapter: at("adapter/adapter_config.json",
			r.Adapter), Quantization: at("quantization.json", r.Quantization), Attention: r.Attention, Torch: "2.15.0",
		Transformers: "5.24.0"}
	if r.TRL != nil {
		q.Configs, q.Model = []string{filepath.Join(folder, "sft.yaml")}, ""
		q.Recorded.Releases = []string{"trl=1.16.0"}
	}
	if r.Loop != nil {
		r.ownLoop(&q, c.config(r))
	}
	return q
}

// ownLoop says a loop in plain PyTorch by flags.
func (r row) ownLoop(q *job.Request, config document) {
	number := func(key string) float64 {
		text, _ := json.Marshal(r.Loop[key])
		value, _ := strconv.ParseFloat(string(text), 64)
		return value
	}
	clip := number("clip")
	q.MicroBatch, q.Clip, q.Recompute = int(number("batch")), &clip, "none"
	if r.Loop["checkpointing"] == true {
		q.Recompute = "full"
	}
	q.Optimizer = fmt.Sprintf("%s/%s", r.Loop["optimizer"], r.Loop["implementation"])
	q.Precision = "fp32"
	switch {
	case r.Loop["autocast"] == true && config["torch_dtype"] == "float32":
		q.Precision = "amp-bf16"
	case config["torch_dtype"] == "bfloat16":
		q.Precision = "bf16"
	}
}

func (c command) gpuOf(r row) string {
	if r.GPU != "" {
		return r.GPU
	}
	return c.gpu
}

// byProgram plans a job by its program, which is played as rank 0 alone.
func (c command) byProgram(r row) (figures, error) {
	device, err := c.play(r)
	return figuresOf([]ledger.Device{device}), err
}

// play returns the GPU of the program of a job.
func (c command) play(r row) (ledger.Device, error) {
	var record *ghost.Record
	var said bytes.Buffer
	err := c.inFolder(r, func(folder string) (err error) {
		on, err := gpu.Find(c.gpuOf(r))
		if err != nil {
			return err
		}
		on.Memory = boundless
		played := ghost.Request{Command: c.program(r, folder), GPU: on, GPUs: max(1, r.GPUs), Nodes: 1, Steps: 2,
			Patience: patience, Output: &said, HostLimit: hostLimit}
		if r.TRL != nil {
			played.Data = &ghost.Data{Tokens: r.Sequence, Columns: []string{"text"}}
		}
		if c.snapshot != "" {
			played.Keep = func(from io.Reader) error { return keep(from, c.snapshot) }
		}
		record, err = played.Run(context.Background())
		return err
	})
	if err != nil {
		return ledger.Device{}, err
	}
	if record.End.Kind != "enough" || record.Steps < 2 {
		return ledger.Device{}, fmt.Errorf("it ended after %d steps: %s %s", record.Steps, record.End.Type,
			record.End.Message)
	}
	return record.GPU, nil
}

// keep writes a snapshot to a file.
func keep(from io.Reader, path string) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, from)
	return errors.Join(err, file.Close())
}

// What a program may take of this host.
const (
	patience  = 10 * time.Minute
	hostLimit = 6 * ledger.GiB
)

// program returns the command that runs a job.
func (c command) program(r row, folder string) []string {
	if r.TRL != nil {
		return []string{filepath.Join(filepath.Dir(c.python), "trl"), "sft", "--config", filepath.Join(folder,
			"sft.yaml")}
	}
	path := filepath.Join(folder, "trainer.py")
	if err := os.WriteFile(path, trainer, 0o644); err != nil {
		log.Fatal(err)
	}
	list := []string{c.python}
	switch {
	case r.Accelerate != nil:
		list = append(list, "-m", "accelerate.commands.launch", "--config_file",
			filepath.Join(folder, "accelerate.yaml"))
	case r.GPUs > 1:
		list = append(list, "-m", "torch.distributed.run", "--nproc_per_node", strconv.Itoa(r.GPUs))
	}
	list = append(list, path, "--model", filepath.Join(folder, "model"), "--sequence", strconv.Itoa(r.Sequence))
	add := func(flag, name string, content document) {
		if content != nil {
			list = append(list, flag, filepath.Join(folder, name))
		}
	}
	add("--training-args", "arguments.json", r.Arguments)
	add("--loop", "loop.json", r.Loop)
	add("--adapter", "adapter", r.Adapter)
	add("--quantization", "quantization.json", r.Quantization)
	if r.Attention != "" {
		list = append(list, "--attention", r.Attention)
	}
	return list
}

// loop are the phases of the training loop. The load of weights that are not here differs.
var loop = []ledger.PhaseName{ledger.Forward, ledger.Backward, ledger.Step}

// figuresOf returns what the GPU of rank 0 holds in the training loop.
func figuresOf(devices []ledger.Device) figures {
	f := figures{}
	for _, device := range devices {
		if device.Kind != ledger.GPU || device.Rank != 0 {
			continue
		}
		for _, phase := range device.Phases {
			if slices.Contains(loop, phase.Name) {
				f[fmt.Sprintf("%s %s", phase.Iteration, phase.Name)] = figure{phase.PeakAllocated, phase.PeakReserved}
			}
		}
	}
	return f
}

// String is the row of the table in a terminal.
func (c compared) String() string {
	if c.failed != "" {
		return fmt.Sprintf("%-30s %-16s %s", c.Name, c.Model, c.failed)
	}
	text := fmt.Sprintf("%-30s %-16s", c.Name, c.Model)
	for level, name := range levels {
		hand, program := c.hand.peak(level), c.program.peak(level)
		text += fmt.Sprintf(" %s %9v %9v %+6.1f %%", name, hand, program, apart(hand, program))
	}
	return text
}

// apart returns by how much the planner's own figure is more than the program's, in percent.
func apart(hand, program ledger.Bytes) float64 {
	return 100 * (float64(hand)/float64(program) - 1)
}
