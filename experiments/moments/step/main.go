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
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
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
	held := flags.String("masters", "fp32", "how master weights are held, fp32: the model uses them; the others have "+
		"bf16 parameters and gradients: "+strings.Join(mastersNames(), ", "))
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
	masters, known := allMasters[*held]
	if !known && *held != "fp32" {
		return fmt.Errorf("masters are %w", fault.Unknown(*held, mastersNames()))
	}
	format := kernel.Format{Algorithm: kernel.Adam, State: kernel.FP32, Moments: kind, Parameter: dtype.F32,
		Gradient: dtype.F32}
	if known {
		format.State, format.Parameter, format.Gradient = masters.state, dtype.BF16, dtype.BF16
	}
	t, err := newTrainer(flags.Arg(0), format, optimizer, *clip)
	if err != nil {
		return err
	}
	t.round = masters.round
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
	format                kernel.Format
	round                 func(master float32, step int64) float32 // of master weights after a step; nil for none
	shard                 *engine.Shard
	engine                *engine.Engine
}

func newTrainer(path string, format kernel.Format, optimizer optim.Adam, clip float64) (*trainer, error) {
	shared, err := mapFile(path)
	if err != nil {
		return nil, err
	}
	half := len(shared) / 2
	t := &trainer{shared: shared, parameters: shared[:half], gradients: shared[half:], format: format}
	if err := t.start(optimizer, clip); err != nil {
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

func (t *trainer) start(optimizer optim.Adam, clip float64) error {
	set, err := kernel.Select()
	if err != nil {
		return err
	}
	cpu, err := anyCPU()
	if err != nil {
		return err
	}
	layout, err := shard.NewLayout(t.format, shard.DefaultChunk, shard.Uniform(t.format, int64(len(t.parameters)/4)))
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
		for i := range c.Len() {
			place := 4 * (at.First + int64(i))
			if begin {
				c.PutMasterWeight(t.format, i, number(t.parameters[place:]))
			}
			c.Gradient.Put(i, number(t.gradients[place:]))
		}
	})
	if t.engine.Step(1).Skipped {
		return errors.New("a gradient is infinite or not a number")
	}
	step := int64(t.engine.Steps())
	t.shard.Each(func(at shard.Chunk, c kernel.Chunk) {
		for i := range c.Len() {
			p := c.MasterWeight(t.format, i)
			if t.round != nil {
				p = t.round(p, step)
				c.PutMasterWeight(t.format, i, p)
			}
			if t.format.State != kernel.FP32 {
				p = kernel.BF16ToFloat32(c.Parameter[i])
			}
			binary.LittleEndian.PutUint32(t.parameters[4*(at.First+int64(i)):], math.Float32bits(p))
		}
	})
	return nil
}

// number returns the first number of some memory.
func number(memory []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(memory)) }

func (t *trainer) close() error {
	var err error
	if t.shard != nil {
		err = t.shard.Close()
	}
	return errors.Join(err, unix.Munmap(t.shared))
}
