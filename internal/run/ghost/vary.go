//go:build linux

package ghost

import (
	"cmp"
	"context"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
)

// Variation is a name that stands in a command as {NAME}, and the values that it takes.
type Variation struct {
	Name   string
	Values []string
	// Range means that the values are the ends of a range of whole numbers.
	Range bool
}

// mostValues is the most values of a list. Each runs the program.
const mostValues = 64

// ParseVariation reads "batch=1,2,4" or "batch=1..64".
func ParseVariation(text string) (Variation, error) {
	name, values, found := strings.Cut(text, "=")
	v := Variation{Name: name}
	if !found || name == "" || strings.ContainsAny(name, "{} \n") {
		return v, fault.Inputf("--vary is %q, expected a name with values", text).
			WithHint("write --vary batch=1,2,4 or --vary batch=1..64, and {batch} in the program's arguments")
	}
	if low, high, found := strings.Cut(values, ".."); found {
		v.Values, v.Range = []string{low, high}, true
		from, err := strconv.Atoi(low)
		to, errTo := strconv.Atoi(high)
		if err != nil || errTo != nil || from < 1 || to <= from {
			return v, fault.Inputf("--vary is %q, expected a range of whole numbers from 1 on", text).
				WithHint("write the smaller one first, as in --vary batch=1..64")
		}
		return v, nil
	}
	v.Values = strings.Split(values, ",")
	if len(v.Values) > mostValues || slices.Contains(v.Values, "") {
		return v, fault.Inputf("--vary is %q, expected 1 to %d values between commas", text, mostValues).
			WithHint("write --vary batch=1,2,4, or a range such as --vary batch=1..64")
	}
	return v, nil
}

// command puts a value in the place of {NAME}.
func (v Variation) command(words []string, value string) []string {
	words = slices.Clone(words)
	for i := range words {
		words[i] = strings.ReplaceAll(words[i], "{"+v.Name+"}", value)
	}
	return words
}

// Varied is how the program ran with one value.
type Varied struct {
	Value string
	Job   *Job // nil if it could not be planned
	Err   error
	// Devices are those of the job, and Verdict says whether they suffice.
	Devices []ledger.Device
	Verdict plan.Result
}

// Vary plays the job with several values, as many at a time as there are cores. In a range it looks for the largest
// value that fits: it plays the ends and the middle, and then where the memory that they need says that the limit is.
func (r Request) Vary(ctx context.Context, v Variation, host ledger.Bytes, progress activity.Progress) ([]Varied,
	error) {
	if slices.Equal(v.command(r.Command, ""), r.Command) {
		return nil, fault.Inputf("--vary names %s, but {%s} is not in the program's arguments", v.Name, v.Name).
			WithHint("write it where the value stands, as in --batch-size {" + v.Name + "}")
	}
	r.host = newBudget(r.HostLimit)
	all := r.play(ctx, v, first(v), host, progress)
	for v.Range && ctx.Err() == nil {
		value, found := between(all)
		if !found {
			break
		}
		all = append(all, r.play(ctx, v, []string{strconv.Itoa(value)}, host, progress)...)
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if v.Range {
		slices.SortFunc(all, func(a, b Varied) int { return cmp.Compare(a.number(), b.number()) })
	}
	if slices.ContainsFunc(all, func(one Varied) bool { return one.Err == nil }) {
		return all, nil
	}
	return nil, all[0].Err
}

// first are the values that are played first: those of a list, or the ends and the middle of a range.
func first(v Variation) []string {
	if !v.Range {
		return v.Values
	}
	low, high := Varied{Value: v.Values[0]}.number(), Varied{Value: v.Values[1]}.number()
	if middle := (low + high) / 2; middle > low {
		return []string{v.Values[0], strconv.Itoa(middle), v.Values[1]}
	}
	return v.Values
}

func (o Varied) number() int {
	n, _ := strconv.Atoi(o.Value)
	return n
}

// play plays the job with each of these values.
func (r Request) play(ctx context.Context, v Variation, values []string, host ledger.Bytes,
	progress activity.Progress) []Varied {
	if progress != nil {
		progress.Begin("programs with {"+v.Name+"} = "+strings.Join(values, ", "), int64(len(values)), activity.Counts)
		defer progress.End()
	}
	all, turns := make([]Varied, len(values)), make(chan struct{}, runtime.GOMAXPROCS(0))
	var group sync.WaitGroup
	for i, value := range values {
		group.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			one := r
			one.Command, one.Output = v.command(r.Command, value), io.Discard
			all[i] = one.varied(ctx, value, host)
			if progress != nil {
				progress.Advance(1)
			}
		})
	}
	group.Wait()
	return all
}

func (r Request) varied(ctx context.Context, value string, host ledger.Bytes) Varied {
	o := Varied{Value: value}
	if o.Job, o.Err = r.Play(ctx); o.Err != nil {
		return o
	}
	o.Devices = o.Job.Devices(host)
	o.Verdict = plan.Judge(o.Devices).Result
	if o.Job.Failed != "" {
		o.Verdict = plan.DoesNotFit
	}
	return o
}

// needed returns what the fullest device needs at the upper end of its interval, and what it has. Without a capacity it
// is the first GPU.
func (o Varied) needed() (needed, capacity ledger.Bytes) {
	fullest := &o.Devices[0]
	for i := range o.Devices {
		d := &o.Devices[i]
		filled := func(d *ledger.Device) float64 { return float64(d.Interval.Upper) / float64(max(1, d.Capacity)) }
		if d.Capacity > 0 && (fullest.Capacity == 0 || filled(d) > filled(fullest)) {
			fullest = d
		}
	}
	return fullest.Interval.Upper, fullest.Capacity
}

// near is how near the largest value that fits and the next one that does not need to come, as a part of them.
const near = 0.01

// between returns the value to play next: one between the largest that fits and the next larger one that was played,
// and false where the two are near each other. It takes the middle in turns with where a line through the memory of the
// two meets the limit: what is reserved goes in steps, and by the line alone would come near in steps of one.
func between(all []Varied) (value int, found bool) {
	played := slices.DeleteFunc(slices.Clone(all), func(o Varied) bool { return o.Err != nil })
	slices.SortFunc(played, func(a, b Varied) int { return cmp.Compare(a.number(), b.number()) })
	over := slices.IndexFunc(played, func(o Varied) bool {
		return o.Verdict == plan.DoesNotFit || o.Verdict == plan.Tight
	})
	if over < 1 { // nothing fits, or all does
		return 0, false
	}
	low, high := played[over-1].number(), played[over].number()
	if float64(high-low) <= max(1, near*float64(low)) {
		return 0, false
	}
	from, capacity := played[over-1].needed()
	to, _ := played[over].needed()
	share := .5
	if to > from && len(all)%2 == 1 {
		share = float64(capacity-from) / float64(to-from)
	}
	return min(max(low+int(share*float64(high-low)), low+1), high-1), true
}
