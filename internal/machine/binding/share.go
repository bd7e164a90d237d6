package binding

import (
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
)

// TrainerShare is a number of cores of each rank, or a fraction of them, not both. As a flag: "2", "0.25", "0" for
// none, "1.0" for all.
type TrainerShare struct {
	Cores    int
	Fraction float64
}

// DefaultTrainerShare is half of the cores. It was the best of the shares measured in DeepSpeed issue 7478, and
// DeepSpeed's ZenFlow uses it.
var DefaultTrainerShare = TrainerShare{Fraction: 0.5}

// WholeTrainerShare is all cores, for ranks without an optimizer on this host.
var WholeTrainerShare = TrainerShare{Fraction: 1}

const shareHint = "give a number of cores such as 2, or a fraction of them such as 0.25"

// Set reads the form that String writes. A number with a point is a fraction.
func (s *TrainerShare) Set(text string) error {
	share := TrainerShare{}
	var err error
	if strings.ContainsAny(text, ".eE") {
		share.Fraction, err = strconv.ParseFloat(text, 64)
	} else {
		share.Cores, err = strconv.Atoi(text)
	}
	if err != nil {
		return fault.Inputf("%q is not a share of the cores", text).WithHint(shareHint)
	}
	if err := share.check(); err != nil {
		return err
	}
	*s = share
	return nil
}

func (s TrainerShare) String() string {
	if s.Fraction == 0 {
		return strconv.Itoa(s.Cores)
	}
	text := strconv.FormatFloat(s.Fraction, 'g', -1, 64)
	if !strings.ContainsAny(text, ".e") {
		text += ".0" // a fraction, not a number of cores
	}
	return text
}

// Type returns the name of the type for help texts.
func (*TrainerShare) Type() string { return "share" }

func (s TrainerShare) check() error {
	bad := func(format string, values ...any) error {
		return fault.Inputf(format, values...).WithHint(shareHint)
	}
	switch {
	case s.Cores < 0:
		return bad("the trainer's share is %d cores: expected 0 or more", s.Cores)
	case !(s.Fraction >= 0 && s.Fraction <= 1): // refuses NaN, too
		return bad("the trainer's share is %v: expected a fraction from 0 to 1", s.Fraction)
	case s.Cores > 0 && s.Fraction > 0:
		return bad("the trainer's share is given twice: %d cores and the fraction %v", s.Cores, s.Fraction)
	}
	return nil
}
