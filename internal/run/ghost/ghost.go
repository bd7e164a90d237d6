//go:build linux

// Package ghost runs a training program on GPUs that are not there, and says what it held: the program plans itself.
//
// A library stands in for CUDA's (library/): device memory is address space, and kernels do nothing. So the program
// runs under PyTorch's own allocator, autograd and engines, without a GPU and without the memory of its weights. Python
// code under which it runs (stage/) plays one rank of the job, and leaves large tensors of the host alone. PyTorch
// records the history of its memory, which package snapshot reads.
package ghost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/after/snapshot"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/machine/probe"
	"plimsoll/internal/plan/simulate"
)

// Request says what to run, and on what.
type Request struct {
	Command []string // the program and its arguments, as a shell would start them
	GPU     gpu.Model
	// GPUs is their number on a node, and Nodes that of nodes, where the command does not say.
	GPUs, Nodes int
	Rank        int // the rank that is played; lastRank is the last
	Steps       int // optimizer steps to make
	// Early has the GPU do its work at once. Else it does so when the program waits for it.
	Early    bool
	Patience time.Duration
	Output   io.Writer // of the program
	// WhatIf are values of PYTORCH_CUDA_ALLOC_CONF that the trace of the first rank is replayed under.
	WhatIf []string
	// Keep is given the snapshot of the first rank's memory, if it is not nil.
	Keep func(io.Reader) error

	// HostLimit is the memory of this host that the program may take; 0 is most of what is left.
	HostLimit ledger.Bytes
	// Data are made up where data sets and tokenizers are not here; nil if they are to be here.
	Data *Data

	host    *budget
	mailbox *mailbox // what ranks leave for each other; nil if this one is played alone
	name    string   // of this rank in the mailbox
}

// Data says what the rows of data sets are like that are made up.
type Data struct {
	Tokens  int      `json:"tokens"`  // of a row
	Columns []string `json:"columns"` // none: the usual ones of text
}

// lastRank is the last rank, however many there are.
const lastRank = -1

// opened are libraries that programs open by name. Those in searched come with PyTorch, whose search path finds its
// own: the loader must know the library by these names before.
var (
	opened   = []string{"libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"}
	searched = []string{"libnvrtc.so.12", "libnvrtc.so.13"}
)

// unlimited returns the capacity of a GPU that nobody named. An expandable segment of PyTorch takes addresses for a
// little more than the capacity, for each stream, and time for each part of them.
func unlimited() ledger.Bytes {
	for _, variable := range []string{"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} {
		if c, err := snapshot.ParseSettings(os.Getenv(variable)); err == nil && c.Expandable {
			return ledger.TiB / 2
		}
	}
	return 4 * ledger.TiB
}

// Run runs a program, and returns its record. A program whose launcher wants more GPUs than the request has runs again
// on as many.
func (r Request) Run(ctx context.Context) (*Record, error) {
	if r.host == nil {
		r.host = newBudget(r.HostLimit)
	}
	record, err := r.run(ctx)
	if err == nil && record.End.Kind == "more" {
		r.GPUs, r.Nodes = record.End.GPUs, record.End.Nodes
		return r.run(ctx)
	}
	return record, err
}

func (r Request) run(ctx context.Context) (*Record, error) {
	interpreter, err := interpreterOf(r.Command[0])
	if err != nil {
		return nil, err
	}
	lib, err := library(ctx)
	if err != nil {
		return nil, err
	}
	scratch, err := os.MkdirTemp("", "plimsoll-ghost-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(scratch)
	if err := writeTree(stage, "stage", scratch); err != nil {
		return nil, err
	}
	for _, name := range slices.Concat(opened, searched) {
		if err := os.Symlink(lib, filepath.Join(scratch, name)); err != nil {
			return nil, err
		}
	}
	if err := r.start(ctx, interpreter, lib, scratch); err != nil {
		return nil, err
	}
	record, err := readRecord(scratch, r)
	if err != nil || r.Keep == nil || record.End.Kind == "more" {
		return record, err
	}
	kept, _, err := files.Open(filepath.Join(scratch, snapshotName))
	if err != nil {
		return nil, err
	}
	defer kept.Close()
	return record, r.Keep(kept)
}

// snapshotName is the file in the scratch folder that PyTorch writes the history of its memory to.
const snapshotName = "snapshot.pickle"

// start runs the program until its end.
func (r Request) start(ctx context.Context, interpreter, lib, scratch string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.Patience, fmt.Errorf("it was not done after %v", r.Patience))
	defer cancel()
	settings, err := json.Marshal(r.settings(scratch))
	if err != nil {
		return err
	}
	command := exec.Command(interpreter, append([]string{"-m", "plimsoll_stage"}, r.Command...)...)
	command.Env = append(environment(), r.variables(lib, scratch, string(settings))...)
	output, said, err := r.pipe()
	if err != nil {
		return err
	}
	command.Stdout, command.Stderr = output, output
	command.SysProcAttr = withoutNetwork()
	err = command.Start()
	if err != nil { // in a container that forbids namespaces
		command.SysProcAttr = alone()
		err = command.Start()
	}
	_ = output.Close() // the program has it
	if err != nil {
		return fault.Inputf("%s cannot be started: %v", interpreter, err)
	}
	root := command.Process.Pid
	all := &processTree{scratch: scratch, members: map[probe.Identity]bool{}}
	ended, guarded := make(chan struct{}), make(chan struct{})
	ctx, exceed := context.WithCancelCause(ctx)
	defer exceed(nil)
	go func() {
		defer close(guarded)
		if why := r.host.guard(all, root, scratch, ended); why != nil {
			exceed(why)
		}
	}()
	stop := context.AfterFunc(ctx, func() { all.end(root) })
	err = command.Wait()
	stop()
	close(ended)
	<-guarded
	_ = syscall.Kill(-root, syscall.SIGKILL)
	all.end(root) // what it has started and left behind, and which may have the output open
	<-said
	if ctx.Err() == context.Canceled { // by a signal, as another rank has failed, or as it took too much memory
		return context.Cause(ctx)
	}
	if cause := context.Cause(ctx); cause != nil {
		return fault.Inputf("%s was ended: %v", strings.Join(r.Command, " "), cause).
			WithHint("give the program fewer layers or shorter sequences, or --patience more time")
	}
	var status *exec.ExitError
	if !errors.As(err, &status) {
		return err
	}
	if how, known := status.Sys().(syscall.WaitStatus); known && how.Signaled() {
		return fault.Inputf("%s was ended by signal %d (%v)", strings.Join(r.Command, " "), int(how.Signal()),
			how.Signal()).WithHint("its output may say why; the kernel ends a program with signal 9 where memory " +
			"runs out")
	}
	return nil // the record says how it ended
}

// pipe returns a file whose content goes to the output. said is closed when nobody has the file open any more.
func (r Request) pipe() (file *os.File, said <-chan struct{}, err error) {
	from, to, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer from.Close()
		_, _ = io.Copy(r.Output, from)
	}()
	return to, done, nil
}

// alone starts a process in a group of its own, which ends with this process.
func alone() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// withoutNetwork starts it in a network namespace, too, which has no interface. A user without privileges needs a user
// namespace for that.
func withoutNetwork() *syscall.SysProcAttr {
	a := alone()
	a.Cloneflags = syscall.CLONE_NEWNET
	if user, group := os.Getuid(), os.Getgid(); user != 0 {
		a.Cloneflags |= syscall.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: user, HostID: user, Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: group, HostID: group, Size: 1}}
	}
	return a
}

// settings are what the stage is told.
func (r Request) settings(scratch string) map[string]any {
	var mailbox map[string]string
	if r.mailbox != nil {
		mailbox = map[string]string{"folder": r.mailbox.folder, "name": r.name}
	}
	return map[string]any{
		"scratch": scratch, "mailbox": mailbox, "data": r.Data,
		"gpus": r.GPUs, "ranks": r.GPUs * r.Nodes, "rank": r.Rank, "steps": r.Steps,
		"whole_history": r.Keep != nil, // in one file
		"environment": map[string]string{
			"LD_PRELOAD": os.Getenv("LD_PRELOAD"), "LD_LIBRARY_PATH": os.Getenv("LD_LIBRARY_PATH"),
		},
		"set": map[string]string{
			"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled",
			"MLFLOW_TRACKING_URI":           "file:" + filepath.Join(scratch, "mlruns"),
			"TORCHINDUCTOR_COMPILE_THREADS": "1",
			"TORCHINDUCTOR_CACHE_DIR":       filepath.Join(scratch, "inductor"),
			"TRITON_CACHE_DIR":              filepath.Join(scratch, "triton"),
			"NUMBA_CACHE_DIR":               filepath.Join(scratch, "numba"),
			"TMPDIR":                        scratch,
			"TRITON_LIBCUDA_PATH":           scratch,
			"PYTHONDONTWRITEBYTECODE":       "1",
			"TORCH_EXTENSIONS_DIR":          filepath.Join(scratch, "extensions"),
		},
	}
}

// variables are those that the library and the stage read before the program begins.
func (r Request) variables(lib, scratch, settings string) []string {
	capacity := r.GPU.Memory
	if capacity == 0 {
		capacity = unlimited()
	}
	capability := r.GPU.Capability
	if capability == 0 {
		capability = 90
	}
	path := func(name, first string) string {
		if set := os.Getenv(name); set != "" {
			return name + "=" + first + ":" + set
		}
		return name + "=" + first
	}
	preload := "LD_PRELOAD=" + strings.Join(append([]string{lib}, searched...), ":")
	if set := os.Getenv("LD_PRELOAD"); set != "" {
		preload += ":" + set
	}
	name := r.GPU.Name
	if name == "" {
		name = "a GPU that is not there"
	}
	return []string{
		"PLIMSOLL_STAGE=" + settings, preload, path("LD_LIBRARY_PATH", scratch), path("PYTHONPATH", scratch),
		"PLIMSOLL_GHOST_DEVICES=" + strconv.Itoa(r.GPUs),
		"PLIMSOLL_GHOST_CAPACITY=" + strconv.FormatInt(int64(capacity), 10),
		"PLIMSOLL_GHOST_MAJOR=" + strconv.Itoa(capability/10), "PLIMSOLL_GHOST_MINOR=" + strconv.Itoa(capability%10),
		"PLIMSOLL_GHOST_PROCESSORS=" + strconv.Itoa(r.GPU.Processors()),
		"PLIMSOLL_GHOST_EARLY=" + map[bool]string{true: "1", false: "0"}[r.Early],
		"PLIMSOLL_GHOST_NAME=" + name, "PLIMSOLL_GHOST_CONTEXT=" + strconv.FormatInt(int64(r.outside()), 10),
	}
}

// outside returns the bytes that are taken of a GPU outside torch's allocator.
func (r Request) outside() (bytes ledger.Bytes) {
	if r.GPU.Memory == 0 {
		return 0
	}
	for _, h := range simulate.Outside(version.Version{Major: 2}, r.GPU.Capability, r.GPUs*r.Nodes) {
		bytes += h.Bytes
	}
	return bytes
}

// environment is that of this process, without what would hide GPUs.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return strings.HasPrefix(variable, "CUDA_VISIBLE_DEVICES=")
	})
}

// interpreterOf returns the Python that runs a program: itself, or the one that the first line of a script names.
func interpreterOf(program string) (string, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		hint := "give the command as a shell would start it, such as python train.py"
		if _, err := os.Stat(program); err == nil {
			hint = "a file that is no program stands before --, or without it: plimsoll plan " + program
		}
		return "", fault.Inputf("%s: there is no such program", program).WithHint(hint)
	}
	if strings.HasPrefix(filepath.Base(program), "python") {
		return path, nil
	}
	file, _, err := files.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	head := make([]byte, 256)
	n, _ := io.ReadFull(file, head)
	first, _, _ := strings.Cut(string(head[:n]), "\n")
	words := strings.Fields(strings.TrimPrefix(first, "#!"))
	if !strings.HasPrefix(first, "#!") || len(words) == 0 || !strings.Contains(first, "python") {
		return "", fault.Inputf("%s is no program of Python", program).
			WithHint("name the program that trains: python train.py, torchrun, accelerate launch")
	}
	if filepath.Base(words[0]) == "env" && len(words) > 1 {
		return exec.LookPath(words[1])
	}
	return words[0], nil
}
