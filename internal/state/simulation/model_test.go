//go:build linux

package simulation

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"sync"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// mostSteps is the last step that a schedule makes.
const mostSteps = 12

// model is a small shard, and what its state is after each step if nothing disturbs the steps.
type model struct {
	name     string
	format   kernel.Format
	chunk    int64
	sections []shard.Section
	serial   func() *serial
}

// serial is what a run holds that nothing has disturbed.
type serial struct {
	layout    *shard.Layout
	states    [][]byte // after each step
	gradients [][]byte // of each step
}

// models have every algorithm and format of state, sections that steps leave alone, and short chunks.
var models = func() []*model {
	format := func(a kernel.Algorithm, state kernel.State, moments kernel.MomentType, of dtype.Type) kernel.Format {
		return kernel.Format{Algorithm: a, State: state, Moments: moments, Parameter: of, Gradient: dtype.BF16}
	}
	several := []shard.Section{{Elements: 70}, {Elements: 50, Group: 1}, {Elements: 40}}
	mixed := []shard.Section{{Elements: 300, Moments: kernel.MomentsInt8}, {Elements: 70, Group: 1},
		{Elements: 257, Moments: kernel.MomentsInt8}}
	list := []*model{
		{name: "adamw split fp32", chunk: 48,
			format: format(kernel.Adam, kernel.Split, kernel.MomentsFP32, dtype.BF16)},
		{name: "adamw fp32 fp32", chunk: 64, sections: several,
			format: format(kernel.Adam, kernel.FP32, kernel.MomentsFP32, dtype.F32)},
		{name: "adamw split24 int8", chunk: 256, sections: mixed,
			format: format(kernel.Adam, kernel.Split24, kernel.MomentsInt8, dtype.BF16)},
		{name: "lion split bf16", chunk: 40,
			format: format(kernel.Lion, kernel.Split, kernel.MomentsBF16, dtype.BF16)},
		{name: "adagrad fp32 bf16", chunk: 100,
			format: format(kernel.Adagrad, kernel.FP32, kernel.MomentsBF16, dtype.BF16)},
		{name: "sgd fp32 fp32", chunk: 32, sections: several,
			format: format(kernel.SGD, kernel.FP32, kernel.MomentsFP32, dtype.BF16)},
	}
	for _, m := range list {
		if m.sections == nil {
			m.sections = shard.Uniform(m.format, 150)
		}
		m.serial = sync.OnceValue(m.run)
	}
	return list
}()

// run makes the steps with one worker, in memory, without a journal.
func (m *model) run() *serial {
	layout, err := shard.NewLayout(m.format, m.chunk, m.sections)
	if err != nil {
		panic(err)
	}
	s := &serial{layout: layout, gradients: make([][]byte, mostSteps+2)}
	x, err := engine.NewShard(engine.ShardConfig{Layout: layout, CPUs: workers(1), Kernel: kernel.Generic})
	if err != nil {
		panic(err)
	}
	defer x.Close()
	weigh(x)
	for step := range int64(mostSteps + 2) {
		if step > 0 {
			x.EachGradient(func(at shard.Chunk, gradient kernel.Array) {
				for i := range gradient.Len() {
					gradient.Put(i, float32(math.Cos(float64(3*(at.First+int64(i))+step)))*0.01)
				}
			})
			s.gradients[step] = bytes.Clone(x.Arena(ledger.Gradients).Bytes())
			if err := x.BeginThen(m.update(x, step), nil); err != nil {
				panic(err)
			}
			x.Wait()
		}
		state, err := stateOf(x)
		if err != nil {
			panic(err)
		}
		s.states = append(s.states, state)
	}
	return s
}

// weigh gives a shard its first weights.
func weigh(x *engine.Shard) {
	x.Each(func(at shard.Chunk, k kernel.Chunk) {
		for i := range k.Len() {
			k.PutMasterWeight(x.Config().Format, i, float32(math.Sin(float64(at.First+int64(i))))*0.1)
		}
	})
}

// stateOf returns all state of a shard, wherever it is, and the steps of its sections.
func stateOf(x *engine.Shard) ([]byte, error) {
	config := x.Config()
	image := make([][]byte, config.Chunks)
	err := x.ViewOf(config.Range(), func(at shard.Chunk, c kernel.Chunk) {
		image[at.Number] = imageOf(config.Layout, c)
	})
	return append(bytes.Join(image, nil), fmt.Sprint(x.OwnSteps())...), err
}

// imageOf returns the state of a chunk.
func imageOf(layout *shard.Layout, c kernel.Chunk) (image []byte) {
	for _, stream := range layout.Streams {
		if stream.Role != kernel.GradientRole {
			image = append(image, c.Bytes(stream.Role)...)
		}
	}
	return image
}

// update returns what a step is made with. Each step has other numbers, so a step that is made twice, or partly as
// another, has other bits. Sections are left alone in turns.
func (m *model) update(x *engine.Shard, step int64) engine.Update {
	o := m.optimizer(1e-3 / float64(1+step%5))
	u := engine.Update{Step: step, GradScale: 1 / float64(1+step%7), Optimizers: []optim.Optimizer{o, o}}
	if sections := x.Config().Sections(); len(sections) > 1 {
		for section := range sections {
			if (step-1+int64(section))%3 == 1 {
				u.LeftAlone = append(u.LeftAlone, section)
			}
		}
	}
	return u
}

func (m *model) optimizer(rate float64) optim.Optimizer {
	switch m.format.Algorithm {
	case kernel.Lion:
		return optim.Lion{LearningRate: rate, Beta1: 0.9, Beta2: 0.99, WeightDecay: 0.1}
	case kernel.Adagrad:
		return optim.Adagrad{LearningRate: rate, Epsilon: 1e-10}
	case kernel.SGD:
		return optim.SGD{LearningRate: rate, Momentum: 0.9, Nesterov: true}
	}
	a := optim.DefaultAdamW()
	a.LearningRate = rate
	return a
}

// workers returns the CPUs of some workers, which are bound to none.
func workers(count int) []int { return slices.Repeat([]int{engine.Unbound}, count) }
