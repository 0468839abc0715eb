#include "mask/predicate/codegen.h"

#include <sstream>

namespace jali::predicate {
namespace {

class Generator {
 public:
  /// Of a canonical program.
  Generator(const Program& program, const std::string& name, bool wide)
      : program_(program),
        name_(name),
        wide_(wide),
        measured_(measured_steps(program_, program_.steps.size())) {
    for (const Step& step : program_.steps) {
      for (int a = 0; a < step.num_args; ++a) {
        if (step.stage == Stage::kCell) from_cells_.push_back(step.args[a]);
      }
    }
    from_cells_.push_back(result());
  }

  /// Bytes of Row at most, 0 where consumers cannot ask cells by it.
  i32 light_row_bytes() const {
    if (!is_light_by_row()) return 0;
    i32 values = 0;
    for (i32 s = 0; s <= result(); ++s) values += handed(s, Stage::kRow);
    return 4 * max_of(values, 1);
  }

  std::string text() {
    out_ << "struct " << name_ << " {\n";
    line("static constexpr const char* kName = \"predicate\";");
    line("static constexpr bool kRowsReadTables = ", flag(!measured_.rows.empty()), ";");
    line("static constexpr bool kColsReadTables = ", flag(!measured_.keys.empty()), ";");
    line("using Int = ", wide_ ? "i64" : "i32", ";");
    parameters();
    side(Stage::kRow);
    side(Stage::kKey);
    visible();
    if (is_light_by_row()) among();
    if (is_light_by_key()) seen_by();
    block(Stage::kRow);
    block(Stage::kKey);
    classify();
    line("JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }");
    line("JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }");
    out_ << "};\n";
    return out_.str();
  }

 private:
  template <class... Parts>
  void line(const Parts&... parts) {
    ((out_ << "  ") << ... << parts) << "\n";
  }
  static const char* flag(bool x) { return x ? "true" : "false"; }
  i32 result() const { return static_cast<i32>(program_.steps.size()) - 1; }
  const Step& step(i32 s) const { return program_.steps[s]; }
  static const char* type(Type t) {
    return t == Type::kBool ? "bool" : t == Type::kInt ? "Int" : "float";
  }
  static const char* interval(Type t) { return t == Type::kFloat ? "FloatInterval" : "Interval"; }
  static std::string numbered(const char* stem, i32 n) { return stem + std::to_string(n); }

  void parameters() {
    line("Scalar offset;");
    for (const Step& s : program_.steps) {
      if (s.op == Op::kConst) line(type(s.type), " ", numbered("c", s.index), ";");
    }
    for (std::size_t n = 0; n < program_.tables.size(); ++n) {
      const TableType& t = program_.tables[n];
      const char* element = t.dtype == DType::kBool  ? "u8"
                            : t.dtype == DType::kI32 ? "i32"
                            : t.dtype == DType::kI64 ? "i64"
                                                     : "float";
      line("TableOf<", element, ", ", t.rank, "> t", n, ";");
      line(t.dtype == DType::kF32 ? "FloatInterval" : "Interval", " range", n, ";");
    }
  }

  /// Whether a value of this stage is handed to visible() in Row (frame and row values) or Col.
  bool handed(i32 s, Stage stage) const {
    if (step(s).op == Op::kConst) return false;  // a member of the struct
    const bool mine =
        step(s).stage == stage || (stage == Stage::kRow && step(s).stage == Stage::kFrame);
    if (!mine) return false;
    for (i32 used : from_cells_) {
      if (used == s) return true;
    }
    return false;
  }

  /// Row and row(), or Col and col().
  void side(Stage stage) {
    const bool rows = stage == Stage::kRow;
    const char* name = rows ? "Row" : "Col";
    std::string members, values;
    for (i32 s = 0; s <= result(); ++s) {
      if (!handed(s, stage)) continue;
      members += std::string("    ") + type(step(s).type) + " " + numbered("v", s) + ";\n";
      values += (values.empty() ? "" : ", ") + numbered("v", s);
    }
    out_ << "\n  struct " << name << " {\n" << members << "  };\n";
    line("JALI_HD ", name, rows ? " row" : " col", "([[maybe_unused]] const Frame& f, i32 ",
         rows ? "i" : "j", ") const {");
    compute(stage, "  ");
    line("  return {", values, "};");
    line("}");
  }

  /// Computes all values of a stage, and those of the frame, in order.
  void compute(Stage stage, const char* indent) {
    for (i32 s = 0; s <= result(); ++s) {
      if (step(s).op == Op::kConst) continue;
      if (step(s).stage != stage && step(s).stage != Stage::kFrame) continue;
      line(indent, "[[maybe_unused]] const ", type(step(s).type), " ", numbered("v", s), " = ",
           value(s, [&](i32 a) { return numbered("v", a); }), ";");
    }
  }

  void visible() {
    auto name = [&](i32 s) {
      const char* owner = step(s).stage == Stage::kCell  ? "v"
                          : step(s).stage == Stage::kKey ? "c.v"
                                                         : "r.v";
      return numbered(owner, s);
    };
    out_ << "\n";
    line("JALI_HD bool visible([[maybe_unused]] Row r, [[maybe_unused]] Col c) const {");
    for (i32 s = 0; s <= result(); ++s) {
      if (step(s).stage != Stage::kCell) continue;
      line("  const ", type(step(s).type), " v", s, " = ", value(s, name), ";");
    }
    line("  return ", operand(result(), name), ";");
    line("}");
  }

  /// Whether a kernel's consumers can ask cells between their products, for which they compute the
  /// steps of cells and of `side`: if these are few and load nothing.
  bool is_light(Stage side) const {
    constexpr i32 kMostSteps = 16;
    i32 steps = 0;
    bool loads = false;
    for (const Step& s : program_.steps) {
      const bool own = s.stage == Stage::kCell || s.stage == side;
      steps += own;
      loads |= own && s.op == Op::kLoad;
    }
    return !wide_ && !loads && steps <= kMostSteps;
  }
  /// Consumers of a forward kernel know of a row what Row holds, and nothing of the frame.
  bool is_light_by_row() const {
    for (const Step& s : program_.steps) {
      for (int a = 0; s.stage == Stage::kKey && a < s.num_args; ++a) {
        const Step& arg = step(s.args[a]);
        if (arg.stage == Stage::kFrame && arg.op != Op::kConst) return false;
      }
    }
    return is_light(Stage::kKey);
  }
  bool is_light_by_key() const { return is_light(Stage::kRow) && program_.tables.empty(); }
  void among() {
    line("template <class Keys>");
    line("JALI_HD auto among([[maybe_unused]] Row r, Keys keys) const {");
    line("  return keys.each([&](i32 j) { return visible(r, col({}, j)); });");
    line("}");
  }
  void seen_by() {
    line("template <class Rows>");
    line("JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const {");
    line("  const Col c = col(f, j);");
    line("  return rows.each([&](i32 i) { return visible(row(f, i), c); });");
    line("}");
  }

  /// RowBlock and rows(), or ColBlock and cols(), with merge().
  void block(Stage stage) {
    const bool rows = stage == Stage::kRow;
    const std::vector<i32>& measured = rows ? measured_.rows : measured_.keys;
    const char* name = rows ? "RowBlock" : "ColBlock";
    const char* at = rows ? "i" : "j";
    out_ << "\n  struct " << name << " {\n    Range at;\n";
    for (i32 s : measured) line("  ", interval(step(s).type), " v", s, ";");
    line("};");
    line("JALI_HD ", name, rows ? " rows" : " cols", "([[maybe_unused]] const Frame& f, i32 ", at,
         "0, i32 ", at, "1) const {");
    if (rows) {
      line("  const i32 p = position(f, offset, i0);");
      line("  ", name, " x = {{p, p + (i1 - i0) - 1}", starts(measured), "};");
    } else {
      line("  ", name, " x = {{j0, j1 - 1}", starts(measured), "};");
    }
    if (!measured.empty()) {
      line("  for (i32 ", at, " = ", at, "0; ", at, " < ", at, "1; ++", at, ") {");
      compute(stage, "    ");
      for (i32 s : measured) line("    x.v", s, " = widen(x.v", s, ", v", s, ");");
      line("  }");
    }
    line("  return x;");
    line("}");
    line("JALI_HD static ", name, " merge(", name, " a, ", name, " b) {");
    std::string merged = "jali::merge(a.at, b.at)";
    for (i32 s : measured) {
      const std::string n = std::to_string(s);
      merged += ", hull(a.v" + n + ", b.v" + n + ")";
    }
    line("  return {", merged, "};");
    line("}");
  }
  std::string starts(const std::vector<i32>& measured) const {
    std::string text;
    for (i32 s : measured) text += step(s).type == Type::kFloat ? ", no_float()" : ", nothing()";
    return text;
  }

  void classify() {
    out_ << "\n";
    line("JALI_HD Tile classify([[maybe_unused]] const Frame& f, [[maybe_unused]] RowBlock r,");
    line("                      [[maybe_unused]] ColBlock c) const {");
    auto measure = [&](i32 s, const char* owner) {
      const bool real = step(s).type == Type::kFloat;
      line("  const ", interval(step(s).type), " v", s, " = ", real ? "settled(" : "", owner, ".v",
           s, real ? ")" : "", ";");
    };
    for (i32 s : measured_.rows) measure(s, "r");
    for (i32 s : measured_.keys) measure(s, "c");
    for (i32 s : measured_.order) {
      line("  const ", interval(step(s).type), " v", s, " = ", range(s), ";");
    }
    line("  return tile_of(v", result(), ".hi == 0, v", result(), ".lo == 1);");
    line("}");
  }

  template <class Name>
  std::string operand(i32 s, Name name) const {
    return step(s).op == Op::kConst ? numbered("c", step(s).index) : name(s);
  }

  /// f(a, b, ...) of the operands.
  template <class Name>
  std::string call(const char* f, const Step& s, Name name, const char* last = "") const {
    std::string text = std::string(f) + "(";
    for (int a = 0; a < s.num_args; ++a) text += (a ? ", " : "") + operand(s.args[a], name);
    return text + last + ")";
  }

  /// The value of a step as an expression.
  template <class Name>
  std::string value(i32 at, Name name) const {
    const Step& s = step(at);
    auto arg = [&](int a) { return operand(s.args[a], name); };
    auto infix = [&](const char* op) { return arg(0) + " " + op + " " + arg(1); };
    switch (s.op) {
      case Op::kBatch:
        return "f.b";
      case Op::kHead:
        return "f.h";
      case Op::kRow:
        return "position(f, offset, i)";
      case Op::kKey:
        return "j";
      case Op::kLoad: {
        const std::string read = call((numbered("t", s.index) + ".at").c_str(), s, name);
        return s.type == Type::kBool  ? read + " != 0"
               : s.type == Type::kInt ? "static_cast<Int>(" + read + ")"
                                      : read;
      }
      case Op::kToInt:
        return step(s.args[0]).type == Type::kFloat ? call("to_int<Int>", s, name) : arg(0);
      case Op::kToBool:
        return arg(0) + " != 0";
      case Op::kToFloat:
        return call("static_cast<float>", s, name);
      case Op::kAnd:
        return infix("&");
      case Op::kOr:
        return infix("|");
      case Op::kXor:
        return infix("^");
      case Op::kNot:
        return (s.type == Type::kBool ? "!" : "~") + arg(0);
      case Op::kLt:
        return infix("<");
      case Op::kLe:
        return infix("<=");
      case Op::kEq:
        return infix("==");
      case Op::kNe:
        return infix("!=");
      case Op::kWhere:
        return arg(0) + " ? " + arg(1) + " : " + arg(2);
      default:
        return call(function(s), s, name);
    }
  }

  /// The function of ops.h and interval.h that computes a step.
  static const char* function(const Step& s) {
    switch (s.op) {
      case Op::kAdd:
        return "add";
      case Op::kSub:
        return "sub";
      case Op::kMul:
        return "mul";
      case Op::kFloorDiv:
        return "quotient";
      case Op::kMod:
        return "remainder";
      case Op::kNeg:
        return "negate";
      case Op::kAbs:
        return "absolute";
      case Op::kMin:
        return "minimum";
      case Op::kMax:
        return "maximum";
      case Op::kShl:
        return "shift_left";
      default:
        return "shift_right";
    }
  }

  /// What a step can be in a block, as an expression.
  std::string range(i32 at) const {
    const Step& s = step(at);
    const bool bools = s.type == Type::kBool;
    auto name = [](i32 a) { return numbered("v", a); };
    // In ranges, literals are values like all others.
    auto ranged = [&](const char* f) {
      std::string text = std::string(f) + "(";
      for (int a = 0; a < s.num_args; ++a) text += (a ? ", " : "") + name(s.args[a]);
      return text + ")";
    };
    switch (s.op) {
      case Op::kConst:
        return (s.type == Type::kFloat ? "float_point(c" : "point(c") + std::to_string(s.index) +
               ")";
      case Op::kBatch:
        return "point(f.b)";
      case Op::kHead:
        return "point(f.h)";
      case Op::kRow:
        return "{r.at.lo, r.at.hi}";
      case Op::kKey:
        return "{c.at.lo, c.at.hi}";
      case Op::kLoad:
        return numbered("range", s.index);
      case Op::kToInt:
        return step(s.args[0]).type == Type::kFloat ? ranged("int_of") : name(s.args[0]);
      case Op::kToBool:
        return ranged("nonzero");
      case Op::kToFloat:
        return ranged("float_of");
      case Op::kAnd:
        return ranged(bools ? "both" : "bit_and");
      case Op::kOr:
        return ranged(bools ? "either" : "bit_or");
      case Op::kXor:
        return ranged(bools ? "differ" : "bit_xor");
      case Op::kNot:
        return ranged(bools ? "invert" : "bit_not");
      case Op::kLt:
        return ranged("less");
      case Op::kLe:
        return ranged("less_equal");
      case Op::kEq:
        return ranged("equal");
      case Op::kNe:
        return ranged("differ");
      case Op::kWhere:
        return ranged("choose");
      default:
        return ranged(function(s));
    }
  }

  const Program program_;
  const std::string name_;
  const bool wide_;
  const Measured measured_;
  std::vector<i32> from_cells_;  // what visible() uses
  std::ostringstream out_;
};

}  // namespace

Program canonical(const Program& program) {
  return compact(program, [](i32 a, i32 b) { return a == b; });
}

std::string generate(const Program& program, const std::string& name, bool wide) {
  return Generator(canonical(program), name, wide).text();
}

i32 light_row_bytes(const Program& program, bool wide) {
  return Generator(program, "", wide).light_row_bytes();
}

}  // namespace jali::predicate
