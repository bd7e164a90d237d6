package shell

import (
	"strconv"

	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/syntax"
)

// counts follows a loop such as for ((i = 0; i < n; i++)) turn by turn. It is false for a loop whose turns are unknown
// or too many, of which it has followed nothing.
func (r *runner) counts(loop *syntax.CStyleLoop, body []*syntax.Stmt) bool {
	name, first, is := r.setsNumber(loop.Init)
	if turns := r.turns(loop, name, first); !is || turns < 0 {
		return false
	} else if turns > 1 {
		quiet, often := r.quiet, r.often
		defer r.keepsHere()()
		r.often = max(1, r.often) * turns
		defer func() { r.quiet, r.often = quiet, often }()
	}
	r.setNumber(name, first, loop)
	for turn := 0; r.nonzero(loop.Cond) == yes && r.steps > 0; turn++ {
		r.quiet = r.quiet || turn > 0
		if !r.turn(body) {
			return true
		}
		n, is := r.stepped(loop.Post, name)
		if !is {
			return true
		}
		r.setNumber(name, n, loop)
	}
	return true
}

// turns returns how many turns a loop has by its own expressions, -1 where these do not say it.
func (r *runner) turns(loop *syntax.CStyleLoop, name string, first int) int {
	if name == "" || loop.Cond == nil {
		return -1
	}
	before, was := r.values[name]
	defer func() {
		if r.forget(name); was {
			r.set(name, before)
		}
	}()
	r.setNumber(name, first, loop)
	for turn := range mostTurns {
		switch r.nonzero(loop.Cond) {
		case no:
			return turn
		case unsure:
			return -1
		}
		n, is := r.stepped(loop.Post, name)
		if !is {
			return -1
		}
		r.setNumber(name, n, loop)
	}
	return -1
}

func (r *runner) setNumber(name string, is int, at syntax.Node) {
	r.steps--
	r.set(name, variable{word: Word{Text: strconv.Itoa(is), At: r.at(at)}, at: r.at(at)})
}

// setsNumber returns the variable and the number of an expression such as i = 0.
func (r *runner) setsNumber(x syntax.ArithmExpr) (name string, is int, known bool) {
	b, isBinary := x.(*syntax.BinaryArithm)
	if !isBinary || b.Op != syntax.Assgn {
		return "", 0, false
	}
	w, isWord := b.X.(*syntax.Word)
	var unknown []string
	if !isWord || !syntax.ValidName(w.Lit()) || !r.computes(b.Y, &unknown) {
		return "", 0, false
	}
	n, err := expand.Arithm(r.config(), b.Y)
	return w.Lit(), n, err == nil
}

// stepped returns the number of a variable after an expression such as i++ or i += 2.
func (r *runner) stepped(x syntax.ArithmExpr, name string) (int, bool) {
	is, err := strconv.Atoi(r.values[name].word.Text)
	if err != nil {
		return 0, false
	}
	switch x := x.(type) {
	case *syntax.UnaryArithm:
		w, isWord := x.X.(*syntax.Word)
		if !isWord || w.Lit() != name || x.Op != syntax.Inc && x.Op != syntax.Dec {
			return 0, false
		}
		if x.Op == syntax.Dec {
			return is - 1, true
		}
		return is + 1, true
	case *syntax.BinaryArithm:
		w, isWord := x.X.(*syntax.Word)
		var unknown []string
		if !isWord || w.Lit() != name || x.Op != syntax.AddAssgn || !r.computes(x.Y, &unknown) {
			return 0, false
		}
		by, err := expand.Arithm(r.config(), x.Y)
		return is + by, err == nil
	}
	return 0, false
}
