//go:build linux

package tune

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"
)

func never() bool { return false }

// exactly measures a time that never varies, and counts how often.
func exactly(of func(cores int) float64, count *int) Measure {
	return func(cores int, enough func([]float64) bool) (samples []float64, _ error) {
		*count++
		for !enough(samples) {
			samples = append(samples, of(cores))
		}
		return samples, nil
	}
}

func TestCurvesAreAmdahls(t *testing.T) {
	law := func(cores int) float64 { return 0.3 + 2/float64(cores) }
	count := 0
	c := NewCurve(exactly(law, &count), 2, never)
	for _, cores := range []int{64, 4, 64, 8} { // the last is one too many
		if _, err := c.at(cores); err != nil {
			t.Fatal(err)
		}
	}
	if count != 2 || len(c.Points()) != 2 {
		t.Errorf("%d measurements and %d points, want 2", count, len(c.Points()))
	}
	for cores, like := range map[int]int{4: 4, 5: 5, 17: 17, 63: 63, 64: 64, 2: 4, 99: 64} {
		want := law(like)
		if got := c.Seconds(cores); math.Abs(got-want) > 1e-12 {
			t.Errorf("%d cores take %g, want %g", cores, got, want)
		}
	}
}

// TestSamplingEnds when the median is known, after the most samples, and early when it is late.
func TestSamplingEnds(t *testing.T) {
	late := false
	c := NewCurve(nil, 1, func() bool { return late })
	steady, wild := []float64{}, []float64{}
	for i := range mostSamples {
		steady, wild = append(steady, 1), append(wild, float64(1+i%7))
	}
	for n := range mostSamples + 1 {
		if got, want := c.enough(steady[:n]), n >= leastSamples; got != want {
			t.Errorf("%d equal samples: %t", n, got)
		}
		if got, want := c.enough(wild[:n]), n == mostSamples; got != want {
			t.Errorf("%d different samples: %t", n, got)
		}
	}
	if late = true; !c.enough(wild[:leastSamples]) || c.enough(wild[:leastSamples-1]) {
		t.Error("when it is late, the least samples are enough")
	}
}

func TestKnees(t *testing.T) {
	for _, test := range []struct {
		name string
		rate func(cores float64) float64
		want int
	}{
		{"one core is enough", func(float64) float64 { return 1 }, 1},
		{"every core counts", func(cores float64) float64 { return cores }, 60},
		{"plateau", func(cores float64) float64 { return min(cores, 20) }, 19},
		{"decline", func(cores float64) float64 { return min(cores, 20) * math.Pow(0.99, max(0, cores-20)) }, 19},
	} {
		count := 0
		seconds := func(cores int) float64 { return 1 / test.rate(float64(cores)) }
		always := func(int) float64 { return 1 }
		s := &Search{Cores: 64, Update: NewCurve(exactly(seconds, &count), mostPoints, never),
			Trainer: NewCurve(exactly(always, new(int)), mostPoints, never), Step: sum, Shares: true}
		if _, err := s.Choose(); err != nil {
			t.Fatal(err)
		}
		knee, err := s.Update.Knee(0.95)
		if err != nil || knee < test.want || knee > test.want+resolution(test.want) {
			t.Errorf("%s: %d cores, %v; want %d", test.name, knee, err, test.want)
		}
	}
}

// TestLateSearchesEnd with what was measured before.
func TestLateSearchesEnd(t *testing.T) {
	for _, cores := range []int{1, 2, 3, 200} {
		updates, trainers := 0, 0
		late := func() bool { return updates > 1 }
		law := func(cores int) float64 { return 1 / float64(cores) }
		s := &Search{Cores: cores, Update: NewCurve(exactly(law, &updates), mostPoints, late),
			Trainer: NewCurve(exactly(law, &trainers), mostPoints, late), Step: sum, Shares: true}
		choice, err := s.Choose()
		if err != nil || updates > leastPoints || choice.Optimizer < 1 || choice.Optimizer > cores {
			t.Errorf("%d cores: %+v after %d measurements: %v", cores, choice, updates, err)
		}
		if _, err := s.Update.Knee(0.95); err != nil || updates > leastPoints {
			t.Errorf("%d cores: the knee took %d measurements: %v", cores, updates, err)
		}
	}
}

// TestFailedMeasurementsEndASearch, whichever they are.
func TestFailedMeasurementsEndASearch(t *testing.T) {
	failed := errors.New("no memory")
	for first := range 8 {
		count := 0
		failing := func(cores int, enough func([]float64) bool) ([]float64, error) {
			if count++; count > first {
				return nil, failed
			}
			return exactly(func(int) float64 { return 1 / float64(cores) }, new(int))(cores, enough)
		}
		s := &Search{Cores: 16, Update: NewCurve(failing, mostPoints, never),
			Trainer: NewCurve(failing, mostPoints, never), Step: sum, Shares: true}
		if _, err := s.Choose(); !errors.Is(err, failed) {
			t.Errorf("after %d measurements: %v", first, err)
		}
	}
}

// TestStepsOfMarks: lines that are printed at once make one mark, and steps that come back count once.
func TestStepsOfMarks(t *testing.T) {
	var marks []mark
	for _, m := range []mark{{1, 0}, {2, 0}, {2, time.Second}, {3, 2 * time.Second}, {7, 2 * time.Second},
		{6, 3 * time.Second}, {9, 4 * time.Second}} {
		marks = withMark(marks, m)
	}
	want := []mark{{2, 0}, {7, 2 * time.Second}, {9, 4 * time.Second}}
	if len(marks) != len(want) {
		t.Fatalf("%v, want %v", marks, want)
	}
	for i := range want {
		if marks[i] != want[i] {
			t.Errorf("%v, want %v", marks, want)
		}
	}
}

func TestLastLine(t *testing.T) {
	if got := lastLine("one\ntwo\n\n"); got != "two" || strings.Contains(lastLine(""), "\n") {
		t.Errorf("%q", got)
	}
}
