package optim_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
)

// torchCase is an optimizer to compare with PyTorch's.
type torchCase struct {
	name            string
	peak            float64 // learning rate
	at              func(rate float64) optim.Optimizer
	state           []string // torch's names of the moments, in the order of an element's
	implementations []string // torch's, in fp32
	ours, torch     model
}

func torchCases() []torchCase {
	every := []string{"single", "foreach", "fused"}
	adam := func(name string, change func(*optim.Adam)) torchCase {
		o := optim.DefaultAdamW()
		change(&o)
		at := func(rate float64) optim.Optimizer { o.LearningRate = rate; return o }
		return torchCase{name, o.LearningRate, at, []string{"exp_avg", "exp_avg_sq"}, every, adamOurs(o), adamTorch(o)}
	}
	lion := func(name string, o optim.Lion) torchCase {
		at := func(rate float64) optim.Optimizer { o.LearningRate = rate; return o }
		return torchCase{name, o.LearningRate, at, []string{"exp_avg"}, []string{"single"}, lionOurs(o), lionTorch(o)}
	}
	adagrad := func(name string, change func(*optim.Adagrad)) torchCase {
		o := optim.DefaultAdagrad()
		change(&o)
		at := func(rate float64) optim.Optimizer { o.LearningRate = rate; return o }
		return torchCase{name, o.LearningRate, at, []string{"sum"}, every, adagradOurs(o), adagradTorch(o)}
	}
	sgd := func(name string, o optim.SGD) torchCase {
		at := func(rate float64) optim.Optimizer { o.LearningRate = rate; return o }
		state := []string{"momentum_buffer"}
		if o.Momentum == 0 {
			state = []string{} // torch keeps none
		}
		return torchCase{name, o.LearningRate, at, state, every, sgdOurs(o), sgdTorch(o)}
	}
	return []torchCase{
		adam("AdamW", func(*optim.Adam) {}),
		adam("AdamW/fast", func(o *optim.Adam) { o.Beta1, o.Beta2, o.Epsilon, o.WeightDecay = 0.8, 0.95, 1e-6, 0.1 }),
		adam("AdamW/undecayed", func(o *optim.Adam) { o.WeightDecay = 0 }),
		adam("AdamW/forgetful", func(o *optim.Adam) { o.Beta1 = 0 }),
		adam("Adam", func(o *optim.Adam) { o.L2, o.WeightDecay = true, 0 }),
		// Small enough that no weight changes its sign: there a step is chaotic.
		adam("Adam/L2", func(o *optim.Adam) { o.L2, o.LearningRate = true, 3e-5 }),
		lion("Lion", optim.DefaultLion()),
		lion("Lion/decayed", optim.Lion{LearningRate: 3e-4, Beta1: 0.95, Beta2: 0.98, WeightDecay: 0.1}),
		adagrad("Adagrad", func(*optim.Adagrad) {}),
		adagrad("Adagrad/decayed", func(o *optim.Adagrad) {
			o.LearningRate, o.LearningRateDecay, o.WeightDecay, o.Epsilon = 1e-4, 0.01, 0.05, 1e-6
		}),
		sgd("SGD", optim.SGD{LearningRate: 0.1, Momentum: 0.9}),
		sgd("SGD/dampened", optim.SGD{LearningRate: 0.1, Momentum: 0.9, Dampening: 0.3, WeightDecay: 0.01}),
		sgd("SGD/Nesterov", optim.SGD{LearningRate: 0.1, Momentum: 0.9, Nesterov: true, WeightDecay: 0.01}),
		sgd("SGD/plain", optim.SGD{LearningRate: 0.1, Dampening: 0.5, WeightDecay: 0.01}),
	}
}

// The parameters and the steps after which all results are compared.
var (
	torchShapes = [][]int{{7}, {3, 5, 7}, {129, 33}, {1}, {1009}}
	checkpoints = []int{1, 2, 3, 10, 50, 100, 200}
)

const torchSteps = 200

// torchRates returns a cosine from the peak to a tenth of it.
func torchRates(peak float64) []float64 {
	rates := make([]float64, torchSteps)
	for i := range rates {
		rates[i] = peak * (0.55 + 0.45*math.Cos(math.Pi*float64(i)/torchSteps))
	}
	return rates
}

// torchRun is the file that trajectories.py writes.
type torchRun struct {
	initial   []float32
	gradients [][]float32
	exact     [][][]float64            // by checkpoint: parameters, then each moment
	fp32      map[string][][][]float32 // by implementation
}

// runTorch runs trajectories.py once for all cases.
func runTorch(t *testing.T, cases []torchCase) []torchRun {
	type request struct {
		File            string    `json:"file"`
		Optimizer       string    `json:"optimizer"`
		Seed            int       `json:"seed"`
		State           []string  `json:"state"`
		Implementations []string  `json:"implementations"`
		Shapes          [][]int   `json:"shapes"`
		Rates           []float64 `json:"rates"`
		Checkpoints     []int     `json:"checkpoints"`
	}
	var requests []request
	for i, c := range cases {
		requests = append(requests, request{
			File: fmt.Sprint(i), Optimizer: c.at(c.peak).String(), Seed: i, State: c.state,
			Implementations: c.implementations,
			Shapes:          torchShapes, Rates: torchRates(c.peak), Checkpoints: checkpoints,
		})
	}
	text, err := json.Marshal(requests)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	command := exec.Command(torchtest.Python(t), filepath.Join("testdata", "trajectories.py"), folder)
	command.Stdin = strings.NewReader(string(text))
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", command, err, out)
	}
	elements := 0
	for _, shape := range torchShapes {
		count := 1
		for _, side := range shape {
			count *= side
		}
		elements += count
	}
	var runs []torchRun
	for i, c := range cases {
		data, err := os.ReadFile(filepath.Join(folder, fmt.Sprint(i)))
		if err != nil {
			t.Fatal(err)
		}
		run := torchRun{fp32: map[string][][][]float32{}}
		run.initial = take[float32](t, &data, elements)
		for range torchSteps {
			run.gradients = append(run.gradients, take[float32](t, &data, elements))
		}
		run.exact = takeResults[float64](t, &data, elements, len(c.state))
		for _, name := range c.implementations {
			run.fp32[name] = takeResults[float32](t, &data, elements, len(c.state))
		}
		if len(data) != 0 {
			t.Fatalf("%s: %d bytes are left over", c.name, len(data))
		}
		runs = append(runs, run)
	}
	return runs
}

// take reads a vector off the front of the data.
func take[T float32 | float64](t *testing.T, data *[]byte, elements int) []T {
	vector := make([]T, elements)
	n, err := binary.Decode(*data, binary.LittleEndian, vector)
	if err != nil {
		t.Fatal(err)
	}
	*data = (*data)[n:]
	return vector
}

func takeResults[T float32 | float64](t *testing.T, data *[]byte, elements, moments int) [][][]T {
	results := make([][][]T, len(checkpoints))
	for i := range results {
		for range 1 + moments {
			results[i] = append(results[i], take[T](t, data, elements))
		}
	}
	return results
}

// trajectory is a model's values of all elements.
type trajectory []element

func newTrajectory(initial []float32) trajectory {
	x := make(trajectory, len(initial))
	for i, p := range initial {
		x[i][0].value = float64(p)
	}
	return x
}

func (x trajectory) advance(update func(*element, float64), gradient []float32) {
	for i := range x {
		update(&x[i], float64(gradient[i]))
	}
}

// state is the kernels' state in some format.
type state struct {
	format kernel.Format
	chunk  kernel.Chunk
}

func newState(format kernel.Format, initial []float32) *state {
	s := &state{format: format}
	for _, stream := range format.Streams() {
		data := make([]byte, stream.Type.Size()*int64(len(initial)))
		switch stream.Role {
		case kernel.ParameterRole:
			s.chunk.Parameter = make([]uint16, len(initial))
		case kernel.LowRole:
			s.chunk.Low = make([]uint16, len(initial))
		case kernel.MasterRole:
			s.chunk.Master = slices.Clone(initial)
		case kernel.FirstMomentRole:
			s.chunk.Moments[0] = kernel.Array{Type: stream.Type, Data: data}
		case kernel.SecondMomentRole:
			s.chunk.Moments[1] = kernel.Array{Type: stream.Type, Data: data}
		}
	}
	for i := range s.chunk.Low {
		s.chunk.Parameter[i], s.chunk.Low[i] = kernel.Separate(initial[i])
	}
	return s
}

func (s *state) advance(set kernel.Set, o optim.Optimizer, step int64, gradient []float32) {
	var constants kernel.Constants
	o.Constants(&constants, step, 1)
	s.chunk.Gradient = kernel.Array{Type: dtype.F32, Data: bytesOf(gradient)}
	set.Update(s.format, &constants, s.chunk)
}

// streams are the parameters and then each moment.
func (s *state) streams() [][]float32 {
	streams := [][]float32{slices.Clone(s.chunk.Master)}
	for i, low := range s.chunk.Low {
		streams[0] = append(streams[0], kernel.Merge(s.chunk.Parameter[i], low))
	}
	for _, moment := range s.chunk.Moments[:s.format.Algorithm.Moments()] {
		var stream []float32
		for i := range moment.Len() {
			stream = append(stream, moment.At(i))
		}
		streams = append(streams, stream)
	}
	return streams
}

// bytesOf is the memory of a vector.
func bytesOf(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// TestTorch compares every optimizer with PyTorch. The arbiter is torch in float64. It
// must agree with the float64 model to float64's precision, so the model is right. The
// fp32 results of the kernels and of torch must be as near to it as their orders of
// operations promise. Split state must be the same as fp32 state, to the bit, after every
// step.
func TestTorch(t *testing.T) {
	if testing.Short() {
		t.Skip("starts PyTorch")
	}
	set, err := kernel.Select()
	if err != nil {
		t.Fatal(err)
	}
	cases := torchCases()
	runs := runTorch(t, cases)
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			compareWithTorch(t, set, c, runs[i])
		})
	}
}

func compareWithTorch(t *testing.T, set kernel.Set, c torchCase, run torchRun) {
	algorithm := c.at(c.peak).Algorithm()
	fp32 := newState(kernel.Format{Algorithm: algorithm, State: kernel.FP32, Parameter: dtype.F32, Gradient: dtype.F32},
		run.initial)
	split := newState(kernel.Format{Algorithm: algorithm, State: kernel.Split, Parameter: dtype.BF16,
		Gradient: dtype.F32}, run.initial)
	exact, ours, torch := newTrajectory(run.initial), newTrajectory(run.initial), newTrajectory(run.initial)
	shares := map[string]float64{} // the largest share of its bound that a result uses
	for i, rate := range torchRates(c.peak) {
		step, gradient := int64(i+1), run.gradients[i]
		exact.advance(c.torch(binary64, step, rate), gradient)
		ours.advance(c.ours(flushing, step, rate), gradient)
		torch.advance(c.torch(binary32, step, rate), gradient)
		fp32.advance(set, c.at(rate), step, gradient)
		split.advance(set, c.at(rate), step, gradient)
		checkpoint := slices.Index(checkpoints, int(step))
		if checkpoint < 0 {
			continue
		}
		got := fp32.streams()
		for stream, halves := range split.streams() {
			if !slices.Equal(bytesOf(halves), bytesOf(got[stream])) {
				t.Fatalf("step %d: stream %d of split state is not that of fp32 state", step, stream)
			}
		}
		for stream := range 1 + len(c.state) {
			check := func(who string, model trajectory, result func(element int) float64) {
				for e, want := range run.exact[checkpoint][stream] {
					bound := model[e][stream].error + exact[e][stream].error
					distance := math.Abs(result(e) - want)
					if !(distance <= bound) {
						t.Fatalf("step %d, stream %d, element %d: %s has %g and torch in float64 %g; "+
							"their distance %g is above %g", step, stream, e, who, result(e), want, distance, bound)
					}
					if distance > 0 {
						shares[who] = max(shares[who], distance/bound)
					}
				}
			}
			check("float64 model", exact, func(e int) float64 { return exact[e][stream].value })
			check("plimsoll", ours, func(e int) float64 { return float64(got[stream][e]) })
			for _, name := range c.implementations {
				check("torch "+name, torch,
					func(e int) float64 { return float64(run.fp32[name][checkpoint][stream][e]) })
			}
		}
		c.checkBounds(t, step, ours)
	}
	var line []string
	for _, who := range slices.Sorted(maps.Keys(shares)) {
		line = append(line, fmt.Sprintf("%s %.2f", who, shares[who]))
	}
	t.Logf("largest share of the bound: %s", strings.Join(line, ", "))
}

// checkBounds fails if the bounds are so wide that keeping them proves little. A few
// elements may have wide bounds: Lion's, if rounding decided the sign.
func (c torchCase) checkBounds(t *testing.T, step int64, ours trajectory) {
	wide := 0
	for _, x := range ours {
		unit := 0x1p-23 * max(math.Abs(x[0].value), c.peak)
		if !(x[0].error <= 64*unit*float64(step)) {
			wide++
		}
	}
	if wide > len(ours)/1000 {
		t.Errorf("step %d: %d of %d bounds are above 64 units in the last place a step", step, wide, len(ours))
	}
}
