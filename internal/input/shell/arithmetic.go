package shell

import (
	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/syntax"
)

// Set makes the values an environment that arithmetic may change.
func (r *runner) Set(name string, v expand.Variable) error {
	was := r.values[name]
	r.set(name, variable{word: Word{Text: v.Str, At: r.reading}, at: r.reading, exported: was.exported})
	return nil
}

// calculates follows arithmetic for what it sets: (( X *= 2 )). It returns whether the result is not zero.
func (r *runner) calculates(x syntax.ArithmExpr, at syntax.Node) answer {
	var unknown []string
	if !r.computes(x, &unknown) {
		r.unsettle(x, at)
		return unsure
	}
	r.reading = r.at(at)
	n, err := expand.Arithm(r.config(), x)
	if err != nil {
		r.unsettle(x, at)
		return unsure
	}
	return isTrue(n != 0)
}

// unsettle has the variables be unknown that arithmetic sets.
func (r *runner) unsettle(x syntax.ArithmExpr, at syntax.Node) {
	syntax.Walk(x, func(n syntax.Node) bool {
		if target := assignee(n); target != "" {
			r.undecided(target, r.at(at))
		}
		return true
	})
}

// assignee returns the variable that an operation of arithmetic sets, or "".
func assignee(n syntax.Node) string {
	var target syntax.ArithmExpr
	switch n := n.(type) {
	case *syntax.UnaryArithm:
		if n.Op == syntax.Inc || n.Op == syntax.Dec {
			target = n.X
		}
	case *syntax.BinaryArithm:
		switch n.Op {
		case syntax.Assgn, syntax.AddAssgn, syntax.SubAssgn, syntax.MulAssgn, syntax.QuoAssgn, syntax.RemAssgn,
			syntax.AndAssgn, syntax.OrAssgn, syntax.XorAssgn, syntax.ShlAssgn, syntax.ShrAssgn:
			target = n.X
		}
	}
	switch t := target.(type) {
	case *syntax.Word:
		if name := t.Lit(); syntax.ValidName(name) {
			return name
		}
		if p, is := onlyPart(t).(*syntax.ParamExp); is && p.Param != nil {
			return p.Param.Value
		}
	}
	return ""
}

func onlyPart(w *syntax.Word) syntax.WordPart {
	if len(w.Parts) != 1 {
		return nil
	}
	return w.Parts[0]
}
