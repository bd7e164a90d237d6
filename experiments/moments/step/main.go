// Command step makes the optimizer steps of train.py with Plimsoll's engine.
//
//	step [flags] FILE
//
// The file holds fp32 parameters and then as many fp32 gradients. Both sides map it. A line "step LEARNING_RATE" on
// standard input updates the parameters from the gradients; the command answers "ok". With the first such line the
// parameters must be in the file. The end of the input ends the command.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/dtype"
	"plimsoll/engine"
	"plimsoll/optim"
	"plimsoll/optim/kernel"
	"plimsoll/shard"
)

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "step:", err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader, out io.Writer) error {
	optimizer := optim.DefaultAdamW()
	flags := flag.NewFlagSet("step", flag.ContinueOnError)
	moments := flags.String("moments", "fp32", "how moments are held")
	clip := flags.Float64("clip", 0, "clip gradients to this norm; 0: do not")
	flags.Float64Var(&optimizer.WeightDecay, "weight-decay", optimizer.WeightDecay, "decoupled weight decay")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("expected one file")
	}
	kind, err := kernel.ParseMoments(*moments)
	if err != nil {
		return fmt.Errorf("moments are %w", err)
	}
	t, err := newTrainer(flags.Arg(0), kind, optimizer, *clip)
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		rate, isStep := strings.CutPrefix(lines.Text(), "step ")
		optimizer.LearningRate, err = strconv.ParseFloat(rate, 64)
		if !isStep || err != nil {
			err = fmt.Errorf("%q: expected step and a learning rate", lines.Text())
			break
		}
		if err = t.step(optimizer); err != nil {
			break
		}
		fmt.Fprintln(out, "ok")
	}
	return errors.Join(err, lines.Err(), t.close())
}

// trainer is an engine and the memory that it shares with train.py.
type trainer struct {
	shared                []byte
	parameters, gradients []byte // the two halves of the shared memory
	shard                 *engine.Shard
	engine                *engine.Engine
}

func newTrainer(path string, moments kernel.MomentType, optimizer optim.Adam, clip float64) (*trainer, error) {
	shared, err := mapFile(path)
	if err != nil {
		return nil, err
	}
	half := len(shared) / 2
	t := &trainer{shared: shared, parameters: shared[:half], gradients: shared[half:]}
	if err := t.start(moments, optimizer, clip); err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

func mapFile(path string) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close() // the mapping stays
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() == 0 || info.Size()%8 != 0 {
		return nil, fmt.Errorf("%s has %d bytes: expected parameters and gradients of 4 bytes each", path, info.Size())
	}
	return unix.Mmap(int(file.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

func (t *trainer) start(moments kernel.MomentType, optimizer optim.Adam, clip float64) error {
	set, err := kernel.Select()
	if err != nil {
		return err
	}
	cpu, err := anyCPU()
	if err != nil {
		return err
	}
	format := kernel.Format{Algorithm: kernel.Adam, State: kernel.FP32, Moments: moments, Parameter: dtype.F32,
		Gradient: dtype.F32}
	layout, err := shard.NewLayout(format, shard.DefaultChunk, shard.Uniform(format, int64(len(t.parameters)/4)))
	if err != nil {
		return err
	}
	t.shard, err = engine.NewShard(engine.ShardConfig{Layout: layout, Kernel: set, CPUs: []int{cpu}})
	if err != nil {
		return err
	}
	t.engine, err = engine.New([]*engine.Shard{t.shard}, []optim.Optimizer{optimizer}, clip)
	return err
}

// anyCPU returns a CPU that this process may use.
func anyCPU() (int, error) {
	mask := unix.NewCPUSet(8192)
	if err := unix.SchedGetaffinityDynamic(0, mask); err != nil {
		return 0, err
	}
	for cpu := range 8192 {
		if mask.IsSet(cpu) {
			return cpu, nil
		}
	}
	return 0, errors.New("there is no CPU")
}

func (t *trainer) step(optimizer optim.Adam) error {
	if err := t.engine.SetOptimizer(0, optimizer); err != nil {
		return err
	}
	begin := t.engine.Steps() == 0 // the file holds the parameters from the first step on
	t.shard.Each(func(at shard.Chunk, c kernel.Chunk) {
		if begin {
			copy(bytesOf(c.Master), t.parameters[4*at.First:])
		}
		copy(c.Gradient.Data, t.gradients[4*at.First:])
	})
	if t.engine.Step(1).Skipped {
		return errors.New("a gradient is infinite or not a number")
	}
	t.shard.Each(func(at shard.Chunk, c kernel.Chunk) { copy(t.parameters[4*at.First:], bytesOf(c.Master)) })
	return nil
}

func (t *trainer) close() error {
	var err error
	if t.shard != nil {
		err = t.shard.Close()
	}
	return errors.Join(err, unix.Munmap(t.shared))
}

// bytesOf returns the memory of a vector.
func bytesOf(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}
