package main

import (
	"math"
	"math/rand/v2"
	"slices"
)

const (
	beta1 = 0.9
	// epsilon is PyTorch's default, for largest gradients of about 1.
	epsilon = 1e-8
	// idleSteps without a gradient leave 1e-9 of a first moment.
	idleSteps = 200
	// smallest is the least normal number; smaller values count as zero.
	smallest = 0x1p-126
)

// scenario is a distribution of gradients. An element's gradients are normal
// around a mean of up to one standard deviation, its scale.
type scenario struct {
	name    string
	decades float64 // range of the scales, spread evenly on a logarithmic axis
	rarest  float64 // least chance of a non-zero gradient; chances spread evenly on a logarithmic axis
	jumps   bool    // an element draws a new scale every 2000 steps on average
	waves   bool    // scales swing over a decade in 5000 steps, each with its own phase
}

var scenarios = []scenario{
	{name: "one scale", rarest: 1},
	{name: "4 decades", decades: 4, rarest: 1},
	{name: "6 decades", decades: 6, rarest: 1},
	{name: "sparse", decades: 2, rarest: 0.001},
	{name: "jumps", decades: 4, rarest: 1, jumps: true},
	{name: "waves", decades: 2, rarest: 1, waves: true},
}

// usualSeed is the seed of the results in README.md.
const usualSeed = 7

// gradients draws the gradients of a scenario, the same in every run with a seed.
type gradients struct {
	scenario
	random                     *rand.Rand
	scale, mean, chance, phase []float64
}

func newGradients(s scenario, elements int, seed uint64) *gradients {
	g := &gradients{scenario: s, random: rand.New(rand.NewPCG(seed, 9))}
	for range elements {
		g.scale = append(g.scale, g.drawScale())
		g.mean = append(g.mean, 2*g.random.Float64()-1)
		g.chance = append(g.chance, math.Pow(s.rarest, g.random.Float64()))
		g.phase = append(g.phase, 2*math.Pi*g.random.Float64())
	}
	return g
}

func (g *gradients) drawScale() float64 { return math.Pow(10, -g.decades*g.random.Float64()) }

func (g *gradients) next(step, i int) float32 {
	if g.jumps && g.random.Float64() < 1.0/2000 {
		g.scale[i] = g.drawScale()
	}
	scale := g.scale[i]
	if g.waves {
		scale *= math.Pow(10, 0.5*math.Sin(2*math.Pi*float64(step)/5000+g.phase[i]))
	}
	x := scale * (g.random.NormFloat64() + g.mean[i])
	if g.rarest < 1 && g.random.Float64() >= g.chance[i] {
		return 0
	}
	return float32(x)
}

// truth is the moments of an element in float64.
type truth struct {
	m, v float64
	idle int // steps since the last gradient
}

func (t *truth) step(g, beta2 float64) {
	t.m = beta1*t.m + (1-beta1)*g
	t.v = beta2*t.v + (1-beta2)*g*g
	t.idle++
	if g != 0 {
		t.idle = 0
	}
}

// result is the outcome of one code in one scenario.
type result struct {
	scenario, code string
	beta2          float32
	// v is the second moment over the true one.
	vMean, vSpread, v1, vMedian, v99, vLargest float64
	// mean in the last quarter of the steps over the mean in the second quarter
	vDrift                 float64
	mSlope, mError         float64 // of m/√v true, regressed on the true m/√v; error relative to its size
	uSlope, uError, uWorst float64 // of the update m/(√v + epsilon)
	idle                   float64 // root mean square of the update of elements without gradients
	curve                  []point
}

// point is the distribution of v over the true one at a step.
type point struct{ step, low, median, high float64 }

// comparison collects the sums for a regression on a true value.
type comparison struct{ xx, xy, errors, worst float64 }

func (c *comparison) add(is, should float64) {
	c.xx += should * should
	c.xy += is * should
	c.errors += (is - should) * (is - should)
	c.worst = max(c.worst, math.Abs(is-should))
}

func (c *comparison) slope() float64 { return c.xy / c.xx }
func (c *comparison) error() float64 { return math.Sqrt(c.errors / c.xx) }

// mean averages numbers.
type mean struct{ sum, squares, count float64 }

func (m *mean) add(x float64) { m.sum += x; m.squares += x * x; m.count++ }

func (m *mean) value() float64 { return m.sum / max(m.count, 1) }

func (m *mean) spread() float64 {
	return math.Sqrt(max(0, m.squares/max(m.count, 1)-m.value()*m.value()))
}

// runner is a running code with its statistics.
type runner struct {
	contestant
	states               []state
	ratios               []float64
	second, fourth, idle mean
	m, u                 comparison
	curve                []point
}

// simulate runs the codes side by side over the same gradients.
func simulate(s scenario, codes []contestant, blocks, steps int, beta2 float32, seed uint64) []result {
	elements := blocks * blockElements
	source, true64, drawn := newGradients(s, elements, seed), make([]truth, elements), make([]float32, elements)
	runners := make([]*runner, len(codes))
	for k, c := range codes {
		runners[k] = &runner{contestant: c}
		for range blocks {
			runners[k].states = append(runners[k].states, c.make())
		}
	}
	every := steps / 200
	for step := 1; step <= steps; step++ {
		for i := range drawn {
			drawn[i] = source.next(step, i)
			true64[i].step(float64(drawn[i]), float64(beta2))
		}
		for _, r := range runners {
			first := len(r.ratios)
			for b := range blocks {
				part := true64[b*blockElements:][:blockElements]
				if step%every == 0 {
					r.stepAndCompare(b, step, steps, drawn[b*blockElements:], beta2, part)
				} else {
					r.step(b, step, drawn[b*blockElements:], beta2)
				}
			}
			if step%every == 0 {
				r.mark(step, first, step > steps/5)
			}
		}
	}
	var results []result
	for _, r := range runners {
		results = append(results, r.result(s.name, beta2))
	}
	return results
}

// step makes a step of one block. It returns the moments that update the weights, before they are rounded.
func (r *runner) step(b, step int, g []float32, beta2 float32) (m, v vector) {
	r.states[b].decode(&m, &v)
	for j := range m {
		m[j] = float32(beta1*m[j]) + float32((1-beta1)*g[j])
		v[j] = float32(beta2*v[j]) + float32((1-beta2)*float32(g[j]*g[j]))
		if magnitude(m[j]) < smallest {
			m[j] = 0
		}
		if v[j] < smallest {
			v[j] = 0
		}
	}
	r.states[b].encode(uint32(b), uint32(step), &m, &v)
	return m, v
}

func (r *runner) stepAndCompare(b, step, steps int, g []float32, beta2 float32, true64 []truth) {
	update := func(m, v float64) float64 { return m / (math.Sqrt(v) + epsilon) }
	m, v := r.step(b, step, g, beta2)
	var heldM, heldV vector
	r.states[b].decode(&heldM, &heldV)
	for j, t := range true64 {
		if t.v < epsilon*epsilon {
			continue // epsilon dominates
		}
		ratio := float64(heldV[j]) / t.v
		r.ratios = append(r.ratios, ratio)
		if step <= steps/5 {
			continue
		}
		if part := float64(step) / float64(steps); part > 0.75 {
			r.fourth.add(ratio)
		} else if part > 0.25 && part <= 0.5 {
			r.second.add(ratio)
		}
		r.m.add(float64(heldM[j])/math.Sqrt(t.v), t.m/math.Sqrt(t.v))
		u := update(float64(m[j]), float64(v[j]))
		r.u.add(u, update(t.m, t.v))
		if t.idle >= idleSteps {
			r.idle.add(u * u)
		}
	}
}

// mark adds a point to the curve, and drops the ratios of the beginning.
func (r *runner) mark(step, first int, counts bool) {
	now := slices.Sorted(slices.Values(r.ratios[first:]))
	r.curve = append(r.curve, point{float64(step), quantile(now, 0.01), quantile(now, 0.5), quantile(now, 0.99)})
	if !counts {
		r.ratios = r.ratios[:first]
	}
}

func (r *runner) result(scenario string, beta2 float32) result {
	slices.Sort(r.ratios)
	var v mean
	for _, ratio := range r.ratios {
		v.add(ratio)
	}
	return result{
		scenario: scenario,
		code:     r.name,
		beta2:    beta2,
		vMean:    v.value(),
		vSpread:  v.spread(),
		vDrift:   r.fourth.value() / r.second.value(),
		v1:       quantile(r.ratios, 0.01),
		vMedian:  quantile(r.ratios, 0.5),
		v99:      quantile(r.ratios, 0.99),
		vLargest: quantile(r.ratios, 1),
		mSlope:   r.m.slope(),
		mError:   r.m.error(),
		uSlope:   r.u.slope(),
		uError:   r.u.error(),
		uWorst:   r.u.worst,
		idle:     math.Sqrt(r.idle.value()),
		curve:    r.curve,
	}
}

// quantile returns a quantile of sorted numbers.
func quantile(sorted []float64, share float64) float64 {
	if len(sorted) == 0 {
		return 1
	}
	return sorted[int(share*float64(len(sorted)-1))]
}
